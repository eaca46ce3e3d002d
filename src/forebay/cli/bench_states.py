"""`forebay bench states`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.bench_words import device_of, give, profile_of, progress

__all__ = ["states"]


def states(  # noqa: PLR0913 - one parameter an option
    *,
    variants: Annotated[
        str, typer.Option(help="forebay's variants in turn, as in bench step.")
    ] = "device",
    size: Annotated[str, typer.Option(help="Llama shape, as in bench step.")] = "3b",
    micro_batch: Annotated[
        int, typer.Option("--micro-batch", help="Rows of one forward.", min=1)
    ] = 1,
    sequence: Annotated[int, typer.Option(help="Tokens in a row.", min=1)] = 512,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    profile: Annotated[
        Path | None, typer.Option(help="Profile with the ceilings. Default: measured first.")
    ] = None,
    limit_seconds: Annotated[
        float, typer.Option(help="A contestant that takes longer has not finished.")
    ] = 600.0,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the table and its raw numbers. Default: none.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print raw numbers instead of the table.")
    ] = False,
) -> int:
    """Time offload_states and reload_states, and count the device memory that they free."""
    from forebay.bench.spec import StepSpec
    from forebay.bench.states_bench import bench_states

    spec = StepSpec(
        variant="floor",
        size=size,
        micro_batches=(micro_batch,),
        sequence=sequence,
        device=device_of(device),
    )
    found = bench_states(
        spec,
        variants=variants.split(","),
        progress=progress,
        limit_seconds=limit_seconds,
        profile=profile_of(profile, spec.device),
    )
    give([found.table()], found.as_dict(), name=f"states-{size}", output=output, json=as_json)
    return 0 if found.results else 1
