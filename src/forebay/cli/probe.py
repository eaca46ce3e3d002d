"""`forebay probe`: this machine's speeds into a profile, or what works here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.cli.outputs import file_to_write, write_text
from forebay.hardware.storage import storage_of

__all__ = ["probe"]

_Output = Annotated[
    Path | None,
    typer.Option(
        help="File for the profile. Default: stdout.", dir_okay=False, callback=file_to_write
    ),
]
_Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
_Report = Annotated[
    bool, typer.Option("--report", help="Measure nothing; say what works here and what does not.")
]
_Quick = Annotated[
    bool, typer.Option("--quick", help="Seconds instead of a minute; figures are rougher.")
]
_Drive = Annotated[
    Path | None,
    typer.Option(
        help="Folder on a local drive for state; measured too.", exists=True, file_okay=False
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
_What = Annotated[
    str | None,
    typer.Argument(metavar="[nvme", help="nvme: measure a folder instead of the machine."),
]
_Path = Annotated[
    Path | None,
    typer.Argument(
        metavar="PATH]", help="That folder, on a local drive.", exists=True, file_okay=False
    ),
]
_Most = Annotated[
    str, typer.Option("--most", help="What may be written to the folder in all, as 4GiB.")
]


def probe(  # noqa: PLR0913 - one parameter an option
    what: _What = None,
    path: _Path = None,
    *,
    most: _Most = "4GiB",
    output: _Output = None,
    device: _Device = "auto",
    report: _Report = False,
    quick: _Quick = False,
    drive: _Drive = None,
    as_json: _Json = False,
) -> int:
    """Measure this machine for the planner, or report what works on it.

    Under torchrun it measures between ranks too. Name the profile in the configuration as
    "forebay": {"profile": FILE}. With `nvme PATH` it measures a folder for state in files instead,
    and says what to write in "aio".
    """
    if what is not None:
        _drive(what, path, most=most, output=output, as_json=as_json)
        return 0
    if report:
        _report(as_json=as_json)
        return 0
    from forebay.probe.measuring import Effort, measure_all

    effort = Effort(elements=4 << 20, link_bytes=64 << 20, repeats=3) if quick else None
    profile = measure_all(
        None if device == "auto" else device,
        effort=effort,
        drive=drive,
        progress=lambda text: typer.echo(f"measuring: {text}", err=True),
    )
    if profile is None:
        return 0
    if drive is not None:
        for warning in storage_of(drive).warnings():
            typer.echo(f"warning: {drive}: {warning}", err=True)
    if output is None:
        typer.echo(profile.as_json(), nl=False)
    else:
        write_text(output, profile.as_json())
    return 0


def _drive(what: str, path: Path | None, *, most: str, output: Path | None, as_json: bool) -> None:
    from forebay.probe.folder import probe_drive
    from forebay.units_of_measure import parse_bytes

    if what != "nvme" or path is None:
        raise typer.BadParameter("write: forebay probe nvme PATH")
    found = probe_drive(
        path,
        most_bytes=parse_bytes(most),
        progress=lambda text: typer.echo(f"measuring: {text}", err=True),
    )
    uses = "used for weights in files" if found.direct.library is not None else "not used"
    typer.echo(f"GPUDirect Storage: {uses}: {found.direct.reason}", err=True)
    for warning in found.warnings():
        typer.echo(f"warning: {warning}", err=True)
    if output is not None:
        write_text(output, json.dumps(found.as_dict(), indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
        return
    typer.echo(f"{'block':>9}  {'depth':>5}  {'read GB/s':>9}  {'write GB/s':>10}")
    for one in found.settings:
        mark = "  <-" if one == found.best else ""
        typer.echo(
            f"{one.block_bytes >> 10:>5} KiB  {one.depth:>5}  {one.read / 1e9:>9.2f}  "
            f"{one.write / 1e9:>10.2f}{mark}"
        )
    typer.echo(json.dumps({"aio": found.aio}, indent=2))


def _report(*, as_json: bool) -> None:
    from forebay.probe.environment import report

    findings = report()
    if as_json:
        rows: list[dict[str, Any]] = [
            {**dataclasses.asdict(one), "state": one.state.value} for one in findings
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    part = max(len(one.part) for one in findings)
    for one in findings:
        typer.echo(f"{one.part:<{part}}  {one.state.value:<7}  {one.detail}")
        if one.remedy:
            typer.echo(f"{'':<{part}}  {'':<7}  -> {one.remedy}")
