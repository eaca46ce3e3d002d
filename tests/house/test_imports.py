"""What importing a part loads: the planner needs no torch, the engine no command-line stack."""

from __future__ import annotations

import pytest

from house.tree import python

_LOADS = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[2:])))
"""

_BLOCKED = """
import importlib, sys
for name in sys.argv[2:]:
    sys.modules[name] = None
importlib.import_module(sys.argv[1])
"""

_HEAVY = ("torch", "numpy", "transformers", "datasets", "tensorboard", "matplotlib")


@pytest.mark.parametrize(
    "name",
    ["forebay", "forebay.errors", "forebay.plan", "forebay.config", "forebay.hardware"],
)
def test_loads_no_torch(name: str) -> None:
    """Reading a plan or a configuration must not cost the seconds that torch takes."""
    run = python(_LOADS, name, *_HEAVY)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def test_version_loads_no_torch() -> None:
    """`forebay.__version__` is answered from the metadata."""
    run = python("import forebay, sys; print(forebay.__version__, 'torch' in sys.modules)")
    assert run.stdout.split()[1:] == ["False"], run.stderr


@pytest.mark.parametrize("name", ["forebay.engine", "forebay.engine.offload"])
def test_engine_needs_no_command_line_stack(name: str) -> None:
    """The engine is a library: pydantic, datasets, typer and their like stay outside."""
    absent = ("pydantic", "datasets", "typer", "rich", "transformers", "tensorboard", "hjson")
    run = python(_BLOCKED, name, *absent)
    assert run.returncode == 0, run.stderr


def test_no_part_of_the_package_works_at_import() -> None:
    """Importing the public names starts no thread and warns about nothing."""
    code = (
        "import threading, forebay, forebay.engine.offload, forebay.compat.api; "
        "print(threading.active_count())"
    )
    run = python(code, PYTHONWARNINGS="error::UserWarning:forebay")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "1"
