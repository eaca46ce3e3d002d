"""A result as a Markdown table; machine and versions in the file's name, raw JSON beside it."""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import forebay

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from forebay.hardware.profile import Machine

__all__ = ["Table", "file_stem", "gigabytes", "write_result"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What a benchmark found.

    Attributes:
        title: One line.
        head: Names of the columns.
        rows: Cells as text.
        notes: Sentences below the table.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """The table with its title and notes."""
        lines = [f"# {self.title}", ""]
        lines += _line(self.head), _line(["---"] * len(self.head))
        lines += [_line(row) for row in self.rows]
        lines += ["", *(f"* {note}" for note in self.notes)]
        return "\n".join(lines).rstrip() + "\n"


def gigabytes(nbytes: int | None) -> str:
    """A cell; empty where nothing was measured."""
    return "" if nbytes is None else f"{nbytes / 1e9:.1f}"


def file_stem(words: str) -> str:
    """A file's name without its ending, in letters that any file system and link takes."""
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def write_result(
    folder: Path,
    tables: Sequence[Table],
    *,
    name: str,
    machine: Machine,
    command: str,
    raw: Mapping[str, Any],
) -> Path:
    """Write tables and raw numbers.

    Args:
        folder: Where to; made if missing.
        tables: What is shown.
        name: The benchmark's name, first in the file's name.
        machine: Where it ran.
        command: What was typed.
        raw: Everything that was measured.

    Returns:
        The tables' path; the raw numbers lie beside it as JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    device = "" if machine.device == "cpu" else f"{machine.device}-"
    words = f"{name}-{device}{machine.cpu}-{machine.cpus}-cpus-torch-{torch.__version__}"
    path = folder / f"{file_stem(words)}.md"
    versions = f"forebay {forebay.__version__}, torch {torch.__version__}"
    notes = f"* Machine: {machine.cpu}, {machine.cpus} processors, accelerator {machine.device}; "
    notes += f"{versions}, Python {platform.python_version()}. Load average of the last minute, "
    notes += f"the benchmark's own included: {os.getloadavg()[0]:.1f}.\n"
    shown = f"\n```text\n{command}\n```\n"
    text = "\n".join(table.markdown() for table in tables)
    path.write_text(text + notes + shown, encoding="utf-8")
    data = {"command": command, "versions": versions, **raw}
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return path
