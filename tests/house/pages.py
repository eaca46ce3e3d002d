"""The documentation as the house tests read it: pages, fenced blocks, commands and links."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from house.tree import ROOT, files, relative

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")

# Fences that hold no command. A command stands in `console`, where a test finds it.
LANGUAGES = {"console", "cpp", "json", "python", "text"}


class Block(NamedTuple):
    """A fenced block: the page it stands on, its language and its text."""

    page: str
    language: str
    text: str


class Command(NamedTuple):
    """A command that a page tells the reader to type."""

    page: str
    line: str


def pages() -> list[Path]:
    """Returns README, CONTRIBUTING and every other Markdown page."""
    return files(".md")


def blocks(*languages: str) -> Iterator[Block]:
    """Yields the fenced blocks of all pages, of the languages given or of all."""
    for path in pages():
        for _, language, text in _FENCE.findall(path.read_text(encoding="utf-8")):
            if not languages or language in languages:
                yield Block(relative(path), language, text)


def commands() -> Iterator[Command]:
    """Yields each line that begins with `$ ` in a `console` block, continuation lines joined."""
    for block in blocks("console"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.lstrip().startswith("$ "):
                yield Command(block.page, " ".join(line.lstrip()[2:].split()))


def links(path: Path) -> Iterator[str]:
    """Yields the targets of a page's links that lie in the repository."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    for target in _LINK.findall(text):
        if not re.match(r"[a-z]+:", target) and not target.startswith("#"):
            yield target.partition("#")[0]


def page_path(name: str) -> Path:
    """Returns the file of a page name as it is written in messages."""
    return ROOT / name
