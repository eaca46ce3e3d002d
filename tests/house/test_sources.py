"""What must not stand in the source: silent modules, prints, pickles, one machine's paths."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from house.tree import ROOT, SRC, files, parse, relative, repository_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Folders that exist on one machine only. A path in an example is relative, or starts with /data.
_MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:home|mnt|opt|root|scratch|srv|Users|work)/[\w.-]+")
_URL_HOST = re.compile(r"https?://([\w.-]+)")
# Every host that the repository may name: standards, papers and the projects that docs point to.
_HOSTS = {
    "arxiv.org",
    "docs.pytorch.org",
    "github.com",
    "json-schema.org",
    "localhost",
    "pytorch.org",
    "www.apache.org",
    "www.deepspeed.ai",
    "www.w3.org",
}


def _texts() -> Iterator[tuple[Path, str]]:
    for path in repository_files():
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def _calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(parse(path)) if isinstance(node, ast.Call))


def test_every_module_says_what_it_is() -> None:
    """A module without a docstring has not decided what it is."""
    folders = (SRC, ROOT / "tests", ROOT / "benchmarks", ROOT / "examples", ROOT / "tools")
    silent = [
        relative(path)
        for folder in folders
        for path in files(".py", under=folder)
        if not ast.get_docstring(parse(path))
    ]
    assert not silent


def test_the_library_does_not_print() -> None:
    """Data goes through the command line's writer, all else through logging."""
    printing = [
        f"{relative(path)}:{call.lineno}"
        for path in files(".py", under=SRC)
        for call in _calls(path)
        if isinstance(call.func, ast.Name) and call.func.id == "print"
    ]
    assert not printing


def test_nothing_is_pickled() -> None:
    """Files hold tensors and JSON; a load that could run code is refused (field report 10)."""
    guilty = []
    for path in files(".py", under=SRC):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                names.append(getattr(node, "module", None) or "")
                if {"pickle", "cloudpickle", "dill", "shelve"} & set(names):
                    guilty.append(f"{relative(path)}:{node.lineno}")
        for call in _calls(path):
            if ast.unparse(call.func) == "torch.load":
                safe = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                if safe.get("weights_only") != "True":
                    guilty.append(f"{relative(path)}:{call.lineno}")
    assert not guilty


def test_no_machine_path_is_written_down() -> None:
    """What is in the repository works on every machine."""
    found = [
        f"{relative(path)}: {match.group()}"
        for path, text in _texts()
        for match in _MACHINE_PATH.finditer(text)
    ]
    assert not found


def test_only_known_hosts_are_named() -> None:
    """No download location is written down: where packages come from is the user's business."""
    found = [
        f"{relative(path)}: {match.group(1)}"
        for path, text in _texts()
        for match in _URL_HOST.finditer(text)
        if match.group(1) not in _HOSTS
    ]
    assert not found
