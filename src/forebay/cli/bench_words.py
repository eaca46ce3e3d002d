"""What the verbs of `forebay bench` share: words to values, and results to where they belong."""

from __future__ import annotations

import shlex
import sys
from json import dumps
from typing import TYPE_CHECKING, Any

import typer

from forebay.cli.outputs import saying

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from forebay.bench.tables import Table
    from forebay.hardware.profile import Profile

__all__ = ["bytes_of", "device_of", "give", "numbers", "profile_of", "progress", "show", "write"]


def progress(text: str) -> None:
    """Say what is measured now, on stderr."""
    typer.echo(f"measuring: {text}", err=True)


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    try:
        return tuple(int(one) for one in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no list of whole numbers, as 2,4,8", param_hint=option
        ) from None


def device_of(name: str) -> str:
    """A device's type; "auto" is the current accelerator's."""
    from forebay.accelerators.select import default_device

    return default_device().type if name == "auto" else name


def bytes_of(text: str | None) -> int | None:
    """A size as 4GiB, in bytes; None stays None."""
    from forebay.units_of_measure import parse_bytes

    return None if text is None else parse_bytes(text)


def profile_of(path: Path | None, device: str) -> Profile | None:
    """This machine's profile from its file; None without one.

    Raises:
        ConfigError: It cannot be read, or is another machine's.
    """
    import torch

    from forebay.accelerators.select import accelerator_for, device_name
    from forebay.hardware.profile import load_profile

    if path is None:
        return None
    return load_profile(path, device=device_name(accelerator_for(torch.device(device)).device))


def give(
    tables: Sequence[Table], raw: dict[str, Any], *, name: str, output: Path | None, json: bool
) -> None:
    """Print a result, and keep it where that was asked for."""
    show(tables, raw, json=json)
    write(tables, raw, name=name, output=output)


def show(tables: Sequence[Table], raw: dict[str, Any], *, json: bool) -> None:
    """Print tables, or raw numbers."""
    shown = dumps(raw) if json else "\n".join(table.markdown() for table in tables)
    typer.echo(shown, nl=json)


def write(tables: Sequence[Table], raw: dict[str, Any], *, name: str, output: Path | None) -> None:
    """Write tables and raw numbers into a folder, if there is one.

    Raises:
        TransferError: They could not be written.
    """
    if output is None:
        return
    from forebay.accelerators.select import default_device, device_name
    from forebay.bench.tables import write_result
    from forebay.hardware.profile import Machine

    on_host = name == "adam" or "cpu" in (raw.get("device"), raw.get("spec", {}).get("device"))
    device = "cpu" if on_host else device_name(default_device())
    with saying(output):
        path = write_result(
            output,
            tables,
            name=name,
            machine=Machine.read(device),
            command=shlex.join(["forebay", *sys.argv[1:]]),
            raw=raw,
        )
    typer.echo(f"wrote {path}", err=True)
