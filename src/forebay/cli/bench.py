"""`forebay bench`'s verbs: options to `forebay.bench`, tables to stdout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.bench_nvme import nvme, nvme_step
from forebay.cli.bench_options import (
    Accumulation,
    AnyVariants,
    Budget,
    Clip,
    Device,
    DeviceBudget,
    Elements,
    Folder,
    Json,
    Limit,
    Micro,
    Micros,
    Output,
    OwnVariants,
    Profile,
    Repeats,
    Sequence,
    Size,
    Steps,
    Threads,
    Timeline,
    Variants,
)
from forebay.cli.bench_states import states
from forebay.cli.bench_words import (
    bytes_of,
    device_of,
    give,
    numbers,
    profile_of,
    progress,
    show,
    write,
)
from forebay.cli.outputs import below

if TYPE_CHECKING:
    from forebay.bench.step import StepBench
    from forebay.bench.tables import Table

__all__ = ["bench"]

bench = typer.Typer(
    name="bench",
    help="Measure steps, updates and checkpoints beside the machine's own limits.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench.command(name="nvme")(nvme)
bench.command(name="nvme-step")(nvme_step)
bench.command(name="states")(states)


@bench.command(name="step")
def step(  # noqa: PLR0913 - one parameter an option
    *,
    variants: Variants = "floor,none,r0,r50",
    size: Size = "3b",
    micro_batch: Micros = "8",
    sequence: Sequence = 2048,
    accumulation: Accumulation = 1,
    steps: Steps = 8,
    clip: Clip = 1.0,
    device: Device = "auto",
    threads: Threads = None,
    host_budget: Budget = None,
    device_budget: DeviceBudget = None,
    timeline: Timeline = "",
    profile: Profile = None,
    limit_seconds: Limit = 600.0,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Time the same training step for forebay and others, in turn, beside its floor.

    The floor comes from ceilings that are measured in the same run.
    """
    from forebay.bench.spec import StepSpec
    from forebay.bench.step import bench_step
    from forebay.bench.step_tables import memory_table, step_table, traffic_table

    def _tables(found: StepBench) -> list[Table]:
        return [step_table(found), memory_table(found), traffic_table(found)]

    spec = StepSpec(
        variant="floor",
        size=size,
        micro_batches=numbers(micro_batch, "--micro-batch"),
        sequence=sequence,
        accumulation=accumulation,
        steps=steps,
        clip=clip,
        device=device_of(device),
        threads=threads,
        host_budget=bytes_of(host_budget),
        device_budget=bytes_of(device_budget),
        timeline=timeline,
    )
    name = f"step-{size}-{'-to-'.join(map(str, spec.token_range))}-tokens"

    def _keep(found: StepBench) -> None:
        write(_tables(found), found.as_dict(), name=name, output=output)

    found = bench_step(
        spec,
        variants=variants.split(","),
        progress=progress,
        keep=_keep,
        limit_seconds=limit_seconds,
        profile=profile_of(profile, spec.device),
    )
    show(_tables(found), found.as_dict(), json=as_json)
    return 0 if found.results else 1


@bench.command(name="reads")
def reads(  # noqa: PLR0913 - one parameter an option
    *,
    variants: OwnVariants = "r0",
    size: Size = "3b",
    micro_batch: Micro = 8,
    sequence: Sequence = 2048,
    count: Annotated[int, typer.Option("--reads", help="Reads of each kind.", min=1)] = 200,
    device: Device = "auto",
    threads: Threads = None,
    host_budget: Budget = None,
    profile: Profile = None,
    limit_seconds: Limit = 600.0,
    output: Output = None,
    as_json: Json = False,
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
        device=device_of(device),
        threads=threads,
        host_budget=bytes_of(host_budget),
    )
    found = bench_reads(
        spec,
        variants=variants.split(","),
        progress=progress,
        limit_seconds=limit_seconds,
        profile=profile_of(profile, spec.device),
    )
    give([found.table()], found.as_dict(), name=f"reads-{size}", output=output, json=as_json)
    return 0 if found.results else 1


@bench.command(name="lengths")
def lengths(  # noqa: PLR0913 - one parameter an option
    *,
    variants: AnyVariants = "r0,r50",
    size: Size = "3b",
    micro_batch: Micro = 4,
    tokens: Annotated[
        str, typer.Option("--lengths", help="Tokens in a row, by turns, separated by commas.")
    ] = "512,4096",
    steps: Steps = 30,
    device: Device = "auto",
    threads: Threads = None,
    host_budget: Budget = None,
    device_budget: Annotated[
        str | None,
        typer.Option(
            help="Device memory that a process may use, as 48GiB. Default: what forward and "
            "backward alone reserved, plus resident state, plus 1 GB."
        ),
    ] = None,
    profile: Profile = None,
    limit_seconds: Limit = 600.0,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Watch device memory under a budget while sequence lengths change from step to step."""
    from forebay.bench.lengths_bench import bench_lengths
    from forebay.bench.spec import StepSpec

    spec = StepSpec(
        variant="floor",
        size=size,
        micro_batches=(micro_batch,),
        lengths=numbers(tokens, "--lengths"),
        steps=steps,
        device=device_of(device),
        threads=threads,
        host_budget=bytes_of(host_budget),
        device_budget=bytes_of(device_budget),
    )
    found = bench_lengths(
        spec,
        variants=variants.split(","),
        progress=progress,
        limit_seconds=limit_seconds,
        profile=profile_of(profile, spec.device),
    )
    give([found.table()], found.as_dict(), name=f"lengths-{size}", output=output, json=as_json)
    return 0 if found.results else 1


@bench.command(name="adam")
def adam(
    *,
    elements: Elements = 32 << 20,
    repeats: Repeats = 9,
    threads: Annotated[
        str, typer.Option(help="Numbers of threads, separated by commas. Default: 1, 2, 4, ...")
    ] = "",
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Time the update pass on the host against torch's and against a copy."""
    from forebay.bench.adam import bench_adam

    counts = numbers(threads, "--threads") if threads else None
    found = bench_adam(elements=elements, repeats=repeats, threads=counts, progress=progress)
    give([found.table()], found.as_dict(), name="adam", output=output, json=as_json)
    return 0


@bench.command(name="checkpoint")
def checkpoint(  # noqa: PLR0913 - one parameter an option
    *,
    folder: Folder = Path(),
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
    repeats: Repeats = 5,
    device: Device = "auto",
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Time saving at once and beside training, beside the disk's own write bandwidth."""
    from forebay.bench.checkpoint import CheckpointSpec, bench_checkpoint

    spec = CheckpointSpec(
        millions=millions,
        rows=rows,
        rounds=repeats,
        device=device_of(device),
    )
    variants = [(one, two) for one in precision.split(",") for two in offload.split(",")]
    with below(folder) as inside:
        found = bench_checkpoint(spec, folder=inside, variants=variants, progress=progress)
    give([found.table()], found.as_dict(), name="checkpoint", output=output, json=as_json)
    return 0
