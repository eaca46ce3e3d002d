"""Every command that README and docs show, and how a test knows that it works.

A command that a page gains must be added here, or `test_commands.py` fails.
"""

from __future__ import annotations

from typing import NamedTuple


class Run(NamedTuple):
    """Cheap: the test runs it in an empty folder and wants exit code 0.

    Attributes:
        files: Files put there first, as name and text.
    """

    files: tuple[tuple[str, str], ...] = ()


class ContinuousIntegration(NamedTuple):
    """Run by `.ci/run` itself.

    Attributes:
        target: The make target that the script names.
    """

    target: str


class Covered(NamedTuple):
    """Run, in full or with smaller numbers, by a test elsewhere.

    Attributes:
        test: `path::function` of that test.
    """

    test: str


COMMANDS: dict[str, Run | ContinuousIntegration | Covered] = {
    "make test": ContinuousIntegration("test"),
    "bash .ci/run": ContinuousIntegration("setup"),
    "make docs": Covered("tests/house/test_docs.py::test_site_builds"),
    "make check": ContinuousIntegration("lint"),
    "make slow": Covered("tests/house/test_commands.py::test_targets_exist"),
    "make wheel": Covered("tests/house/test_wheel.py::test_wheel_is_whole"),
}
