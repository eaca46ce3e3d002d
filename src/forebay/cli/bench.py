"""`forebay bench step`, `adam` and `checkpoint`: options to `forebay.bench`, tables to stdout."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from forebay.bench.tables import Table

__all__ = ["bench"]

bench = typer.Typer(
    name="bench",
    help="Measure steps, updates and checkpoints beside the machine's own limits.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Output = Annotated[
    Path | None, typer.Option(help="Folder for the table and its raw numbers. Default: none.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print raw numbers instead of the table.")]
_Variants = Annotated[
    str,
    typer.Option(
        help="Contestants in turn, separated by commas: floor, none, planned, host, device, "
        "synchronous, r0 ... r100 (percent of the state that stays on the device), mix+R+S, "
        "deepspeed2, deepspeed3."
    ),
]
_Size = Annotated[str, typer.Option(help="Llama shape: nano, tiny, 1b, 3b or 7b.")]
_Micro = Annotated[int, typer.Option("--micro-batch", help="Rows of one forward.", min=1)]
_Sequence = Annotated[int, typer.Option(help="Tokens in a row.", min=1)]
_Accumulation = Annotated[int, typer.Option(help="Micro-batches per update.", min=1)]
_Steps = Annotated[int, typer.Option(help="Updates, two of them warm-up.", min=3)]
_Clip = Annotated[float, typer.Option(help="Bound on the global gradient norm.")]
_Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
_Threads = Annotated[int | None, typer.Option(help="Update threads. Default: all cores but one.")]
_Budget = Annotated[
    str | None, typer.Option(help="Host memory that forebay may use, as 120GiB. Default: what is.")
]
_Timeline = Annotated[
    str,
    typer.Option(
        help="File for a trace of three more steps (.json, with a picture beside it); {variant} "
        "in it is replaced. Default: none."
    ),
]
_Limit = Annotated[float, typer.Option(help="Seconds after which a contestant is given up.")]
_Elements = Annotated[int, typer.Option(help="Parameters of one pass.", min=1)]
_Repeats = Annotated[int, typer.Option(help="Rounds.", min=1)]


@bench.command(name="step")
def step(  # noqa: PLR0913 - one parameter an option
    *,
    variants: _Variants = "floor,none,r0,r50",
    size: _Size = "3b",
    micro_batch: _Micro = 8,
    sequence: _Sequence = 2048,
    accumulation: _Accumulation = 1,
    steps: _Steps = 8,
    clip: _Clip = 1.0,
    device: _Device = "auto",
    threads: _Threads = None,
    host_budget: _Budget = None,
    timeline: _Timeline = "",
    limit_seconds: _Limit = 600.0,
    output: _Output = None,
    as_json: _Json = False,
) -> int:
    """Time the same training step for forebay and others, in turn, beside its floor.

    The floor comes from ceilings that are measured in the same run.
    """
    from forebay.accelerators.select import default_device
    from forebay.bench.spec import StepSpec
    from forebay.bench.step import bench_step
    from forebay.units_of_measure import parse_bytes

    spec = StepSpec(
        variant="floor",
        size=size,
        micro_batch=micro_batch,
        sequence=sequence,
        accumulation=accumulation,
        steps=steps,
        clip=clip,
        device=default_device().type if device == "auto" else device,
        threads=threads,
        host_budget=None if host_budget is None else parse_bytes(host_budget),
        timeline=timeline,
    )
    found = bench_step(
        spec, variants=variants.split(","), progress=_progress, limit_seconds=limit_seconds
    )
    name = f"step-{size}-{spec.tokens}-tokens"
    _give(found.table(), found.as_dict(), name=name, output=output, as_json=as_json)
    return 0 if found.results else 1


@bench.command(name="adam")
def adam(
    *,
    elements: _Elements = 32 << 20,
    repeats: _Repeats = 9,
    threads: Annotated[
        str, typer.Option(help="Numbers of threads, separated by commas. Default: 1, 2, 4, ...")
    ] = "",
    output: _Output = None,
    as_json: _Json = False,
) -> int:
    """Time the update pass on the host against torch's and against a copy."""
    from forebay.bench.adam import bench_adam

    counts = [int(count) for count in threads.split(",")] if threads else None
    found = bench_adam(elements=elements, repeats=repeats, threads=counts, progress=_progress)
    _give(found.table(), found.as_dict(), name="adam", output=output, as_json=as_json)
    return 0


@bench.command(name="checkpoint")
def checkpoint(  # noqa: PLR0913 - one parameter an option
    *,
    folder: Annotated[Path, typer.Option(help="Where to write: on the disk to measure.")] = Path(),
    millions: Annotated[
        int, typer.Option(help="Parameters, in millions; 12 bytes each.", min=4)
    ] = 64,
    precision: Annotated[
        str, typer.Option(help="Of the working weights, separated by commas: bf16, fp16, fp32.")
    ] = "bf16,fp32",
    offload: Annotated[
        str, typer.Option(help="Where the state lives, separated by commas: cpu, none.")
    ] = "cpu",
    rows: Annotated[int, typer.Option(help="Of a training step's input.", min=1)] = 256,
    repeats: _Repeats = 5,
    device: _Device = "auto",
    output: _Output = None,
    as_json: _Json = False,
) -> int:
    """Time saving at once and beside training, beside the disk's own write bandwidth."""
    import tempfile

    from forebay.accelerators.select import default_device
    from forebay.bench.checkpoint import CheckpointSpec, bench_checkpoint

    spec = CheckpointSpec(
        millions=millions,
        rows=rows,
        rounds=repeats,
        device=default_device().type if device == "auto" else device,
    )
    variants = [(one, two) for one in precision.split(",") for two in offload.split(",")]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=folder) as inside:
        found = bench_checkpoint(spec, folder=Path(inside), variants=variants, progress=_progress)
    _give(found.table(), found.as_dict(), name="checkpoint", output=output, as_json=as_json)
    return 0


def _progress(text: str) -> None:
    typer.echo(f"measuring: {text}", err=True)


def _give(
    table: Table, raw: dict[str, Any], *, name: str, output: Path | None, as_json: bool
) -> None:
    typer.echo(json.dumps(raw) if as_json else table.markdown(), nl=as_json)
    if output is None:
        return
    from forebay.accelerators.select import default_device, device_name
    from forebay.bench.tables import write_result
    from forebay.hardware.profile import Machine

    on_host = name == "adam" or "cpu" in (raw.get("device"), raw.get("spec", {}).get("device"))
    device = "cpu" if on_host else device_name(default_device())
    path = write_result(
        output,
        table,
        name=name,
        machine=Machine.read(device),
        command=shlex.join(["forebay", *sys.argv[1:]]),
        raw=raw,
    )
    typer.echo(f"wrote {path}", err=True)
