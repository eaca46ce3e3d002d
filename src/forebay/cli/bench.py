"""`forebay bench`'s verbs: options to `forebay.bench`, tables to stdout."""

from __future__ import annotations

import shlex
import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.bench.step import StepBench
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
_WHO = (
    "Contestants in turn, separated by commas: floor, none, planned, host, device, synchronous, "
    "r0 ... r100 (percent of the state that stays on the device), streamed (weights on the host; "
    "+P: P GB of the device for them; +P+R: the first share R resident; +offload: activations on "
    "the host too), mix+R+S, deepspeed2, deepspeed3, fsdp2."
)
_Variants = Annotated[
    str,
    typer.Option(help=f"{_WHO} deepspeed3@8+16 takes part at micro-batches 8 and 16 alone."),
]
_OwnVariants = Annotated[str, typer.Option(help="forebay's variants in turn, as in bench step.")]
_AnyVariants = Annotated[str, typer.Option(help="Contestants in turn, as in bench step.")]
_Size = Annotated[str, typer.Option(help="Llama shape: nano, tiny, 1b, 3b, 7b, 13b, 18b or 20b.")]
_Micro = Annotated[int, typer.Option("--micro-batch", help="Rows of one forward.", min=1)]
_Micros = Annotated[
    str,
    typer.Option(
        "--micro-batch", help="Rows of one forward; several, ascending, are measured in turn: 2,8."
    ),
]
_Sequence = Annotated[int, typer.Option(help="Tokens in a row.", min=1)]
_Accumulation = Annotated[int, typer.Option(help="Micro-batches per update.", min=1)]
_Steps = Annotated[int, typer.Option(help="Updates, two of them warm-up.", min=3)]
_Clip = Annotated[float, typer.Option(help="Bound on the global gradient norm.")]
_Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
_Threads = Annotated[int | None, typer.Option(help="Update threads. Default: all cores but one.")]
_Budget = Annotated[
    str | None, typer.Option(help="Host memory that forebay may use, as 120GiB. Default: what is.")
]
_DeviceBudget = Annotated[
    str | None,
    typer.Option(help="Device memory that a process may use, as 48GiB. Default: all of it."),
]
_Timeline = Annotated[
    str,
    typer.Option(
        help="File for a trace of three more steps (.json, with a picture beside it); {variant} "
        "and {tokens} in it are replaced. Default: none."
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
    micro_batch: _Micros = "8",
    sequence: _Sequence = 2048,
    accumulation: _Accumulation = 1,
    steps: _Steps = 8,
    clip: _Clip = 1.0,
    device: _Device = "auto",
    threads: _Threads = None,
    host_budget: _Budget = None,
    device_budget: _DeviceBudget = None,
    timeline: _Timeline = "",
    limit_seconds: _Limit = 600.0,
    output: _Output = None,
    as_json: _Json = False,
) -> int:
    """Time the same training step for forebay and others, in turn, beside its floor.

    The floor comes from ceilings that are measured in the same run.
    """
    from forebay.bench.spec import StepSpec
    from forebay.bench.step import bench_step
    from forebay.bench.step_tables import memory_table, step_table

    spec = StepSpec(
        variant="floor",
        size=size,
        micro_batches=_numbers(micro_batch, "--micro-batch"),
        sequence=sequence,
        accumulation=accumulation,
        steps=steps,
        clip=clip,
        device=_device(device),
        threads=threads,
        host_budget=_bytes(host_budget),
        device_budget=_bytes(device_budget),
        timeline=timeline,
    )
    name = f"step-{size}-{'-to-'.join(map(str, spec.token_range))}-tokens"

    def _keep(found: StepBench) -> None:
        _write([step_table(found), memory_table(found)], found.as_dict(), name=name, output=output)

    found = bench_step(
        spec,
        variants=variants.split(","),
        progress=_progress,
        keep=_keep,
        limit_seconds=limit_seconds,
    )
    _show([step_table(found), memory_table(found)], found.as_dict(), json=as_json)
    return 0 if found.results else 1


@bench.command(name="reads")
def reads(  # noqa: PLR0913 - one parameter an option
    *,
    variants: _OwnVariants = "r0",
    size: _Size = "3b",
    micro_batch: _Micro = 8,
    sequence: _Sequence = 2048,
    count: Annotated[int, typer.Option("--reads", help="Reads of each kind.", min=1)] = 200,
    device: _Device = "auto",
    threads: _Threads = None,
    host_budget: _Budget = None,
    limit_seconds: _Limit = 600.0,
    output: _Output = None,
    as_json: _Json = False,
) -> int:
    """Time `.item()` of a ready tensor while forebay's transfers run, and without them."""
    from forebay.bench.reads_bench import bench_reads
    from forebay.bench.spec import StepSpec

    spec = StepSpec(
        variant="floor",
        size=size,
        micro_batches=(micro_batch,),
        sequence=sequence,
        reads=count,
        device=_device(device),
        threads=threads,
        host_budget=_bytes(host_budget),
    )
    found = bench_reads(
        spec, variants=variants.split(","), progress=_progress, limit_seconds=limit_seconds
    )
    _give([found.table()], found.as_dict(), name=f"reads-{size}", output=output, json=as_json)
    return 0 if found.results else 1


@bench.command(name="lengths")
def lengths(  # noqa: PLR0913 - one parameter an option
    *,
    variants: _AnyVariants = "r0,r50",
    size: _Size = "3b",
    micro_batch: _Micro = 4,
    tokens: Annotated[
        str, typer.Option("--lengths", help="Tokens in a row, by turns, separated by commas.")
    ] = "512,4096",
    steps: _Steps = 30,
    device: _Device = "auto",
    threads: _Threads = None,
    host_budget: _Budget = None,
    device_budget: Annotated[
        str | None,
        typer.Option(
            help="Device memory that a process may use, as 48GiB. Default: what forward and "
            "backward alone reserved, plus resident state, plus 1 GB."
        ),
    ] = None,
    limit_seconds: _Limit = 600.0,
    output: _Output = None,
    as_json: _Json = False,
) -> int:
    """Watch device memory under a budget while sequence lengths change from step to step."""
    from forebay.bench.lengths_bench import bench_lengths
    from forebay.bench.spec import StepSpec

    spec = StepSpec(
        variant="floor",
        size=size,
        micro_batches=(micro_batch,),
        lengths=_numbers(tokens, "--lengths"),
        steps=steps,
        device=_device(device),
        threads=threads,
        host_budget=_bytes(host_budget),
        device_budget=_bytes(device_budget),
    )
    found = bench_lengths(
        spec, variants=variants.split(","), progress=_progress, limit_seconds=limit_seconds
    )
    _give([found.table()], found.as_dict(), name=f"lengths-{size}", output=output, json=as_json)
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

    counts = _numbers(threads, "--threads") if threads else None
    found = bench_adam(elements=elements, repeats=repeats, threads=counts, progress=_progress)
    _give([found.table()], found.as_dict(), name="adam", output=output, json=as_json)
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

    from forebay.bench.checkpoint import CheckpointSpec, bench_checkpoint

    spec = CheckpointSpec(
        millions=millions,
        rows=rows,
        rounds=repeats,
        device=_device(device),
    )
    variants = [(one, two) for one in precision.split(",") for two in offload.split(",")]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=folder) as inside:
        found = bench_checkpoint(spec, folder=Path(inside), variants=variants, progress=_progress)
    _give([found.table()], found.as_dict(), name="checkpoint", output=output, json=as_json)
    return 0


@bench.command(name="nvme")
def nvme(  # noqa: PLR0913 - one parameter an option
    *,
    folder: Annotated[Path, typer.Option(help="Where: on the drive to measure.")] = Path(),
    size: Annotated[str, typer.Option(help="Of each read and write, as 1GiB.")] = "1GiB",
    block: Annotated[str, typer.Option(help="Of one request, as 1MiB.")] = "1MiB",
    depth: Annotated[int, typer.Option(help="Requests in flight.", min=1)] = 8,
    repeats: _Repeats = 5,
    output: _Output = None,
    as_json: _Json = False,
) -> int:
    """Time the file queue beside fio, in turn; without fio, beside a plain loop.

    Writes the size twelve times with two backends, and as often with each of fio's engines.
    """
    import tempfile

    from forebay.bench.nvme import NvmeSpec, bench_nvme

    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=folder) as inside:
        spec = NvmeSpec(
            path=Path(inside),
            nbytes=_bytes(size) or 0,
            block_bytes=_bytes(block) or 0,
            depth=depth,
            rounds=repeats,
        )
        found = bench_nvme(spec, progress=_progress)
    _give([found.table()], found.as_dict(), name="nvme", output=output, json=as_json)
    return 0


@bench.command(name="nvme-step")
def nvme_step(  # noqa: PLR0913 - one parameter an option
    *,
    folder: Annotated[Path, typer.Option(help="Where: on the drive to measure.")] = Path(),
    size: _Size = "1b",
    micro_batch: _Micro = 8,
    sequence: _Sequence = 2048,
    steps: Annotated[int, typer.Option(help="Timed updates, after two of warm-up.", min=1)] = 6,
    device: _Device = "auto",
    host_budget: Annotated[
        str | None,
        typer.Option(help="Host memory for state, as 8GiB. Default: all of it is in files."),
    ] = None,
    buffers: Annotated[int, typer.Option(help="Pieces in host memory at once.", min=1)] = 8,
    block: Annotated[str, typer.Option(help="Of one request, as 1MiB.")] = "1MiB",
    depth: Annotated[int, typer.Option(help="Requests in flight.", min=1)] = 32,
    output: _Output = None,
    as_json: _Json = False,
) -> int:
    """Time steps with optimizer state in files beside computing, reading and writing alone.

    Writes the state once and once for each step, and 14 GiB to measure the drive.
    """
    from forebay.bench.nvme_step import NvmeStepSpec, bench_nvme_step
    from forebay.links.host_nvme import FileAccess

    spec = NvmeStepSpec(
        path=folder,
        size=size,
        micro_batch=micro_batch,
        sequence=sequence,
        steps=steps,
        device=_device(device),
        host_budget=_bytes(host_budget),
        buffer_count=buffers,
        access=FileAccess(block_bytes=_bytes(block) or 0, queue_depth=depth),
    )
    found = bench_nvme_step(spec, progress=_progress)
    _give([found.table()], found.as_dict(), name=f"nvme-step-{size}", output=output, json=as_json)
    return 0


def _progress(text: str) -> None:
    typer.echo(f"measuring: {text}", err=True)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(one) for one in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no list of whole numbers, as 2,4,8", param_hint=option
        ) from None


def _device(name: str) -> str:
    from forebay.accelerators.select import default_device

    return default_device().type if name == "auto" else name


def _bytes(text: str | None) -> int | None:
    from forebay.units_of_measure import parse_bytes

    return None if text is None else parse_bytes(text)


def _give(
    tables: Sequence[Table], raw: dict[str, Any], *, name: str, output: Path | None, json: bool
) -> None:
    _show(tables, raw, json=json)
    _write(tables, raw, name=name, output=output)


def _show(tables: Sequence[Table], raw: dict[str, Any], *, json: bool) -> None:
    shown = dumps(raw) if json else "\n".join(table.markdown() for table in tables)
    typer.echo(shown, nl=json)


def _write(tables: Sequence[Table], raw: dict[str, Any], *, name: str, output: Path | None) -> None:
    if output is None:
        return
    from forebay.accelerators.select import default_device, device_name
    from forebay.bench.tables import write_result
    from forebay.hardware.profile import Machine

    on_host = name == "adam" or "cpu" in (raw.get("device"), raw.get("spec", {}).get("device"))
    device = "cpu" if on_host else device_name(default_device())
    path = write_result(
        output,
        tables,
        name=name,
        machine=Machine.read(device),
        command=shlex.join(["forebay", *sys.argv[1:]]),
        raw=raw,
    )
    typer.echo(f"wrote {path}", err=True)
