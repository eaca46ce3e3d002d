"""The repository as the house tests see it: its files, its modules and its commands.

Files that git does not ignore count before they are committed, so that a new file is judged
while it is written.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "forebay"
NATIVE_SUFFIXES = (".cpp", ".hpp", ".h", ".inc")


class Function(NamedTuple):
    """A function or method: where it is and how many lines it takes."""

    where: str
    lines: int


@functools.cache
def repository_files() -> tuple[Path, ...]:
    """Returns every file that git tracks or would track, sorted."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = (ROOT / name for name in listing.split("\0") if name)
    return tuple(sorted({path for path in paths if path.is_file()}))


def files(*suffixes: str, under: Path = ROOT) -> list[Path]:
    """Returns the repository's files below a folder that end in one of the suffixes."""
    return [
        path
        for path in repository_files()
        if path.suffix in suffixes and path.is_relative_to(under)
    ]


def relative(path: Path) -> str:
    """Returns a path as it is written in messages."""
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    """Returns the dotted name of a module under src."""
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parse(path: Path) -> ast.Module:
    """Returns a Python file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def python_functions(path: Path) -> Iterator[Function]:
    """Yields each function of a Python file, from `def` to its last line, without docstring."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                words = node.body[0]
                lines -= (words.end_lineno or words.lineno) - words.lineno + 1
            yield Function(f"{relative(path)}:{node.lineno} {node.name}", lines)


def native_functions(path: Path) -> Iterator[Function]:
    """Yields each top-level function of a C++ file, as clang-format lays it out.

    A function begins at an unindented line and ends at a closing brace alone in the first
    column; types end in `};` and namespaces in a comment, so neither is taken for one.
    """
    first = 0
    previous_blank = True
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line and not line[0].isspace() and line[0] not in "}#/" and previous_blank:
            first = number
        previous_blank = not line.strip() or line.startswith(("namespace", "//", "}", "#"))
        if line == "}" and first:
            yield Function(f"{relative(path)}:{first}", number - first + 1)


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new interpreter, so that nothing of this one is loaded there."""
    import os

    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
