"""`forebay bench nvme` and `nvme-step`: the file queue, and training steps that wait for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.bench_options import Device, Folder, Json, Micro, Output, Repeats, Sequence, Size
from forebay.cli.bench_words import bytes_of, device_of, give, progress
from forebay.cli.outputs import below

__all__ = ["nvme", "nvme_step"]


def nvme(  # noqa: PLR0913 - one parameter an option
    *,
    folder: Folder = Path(),
    size: Annotated[str, typer.Option(help="Of each read and write, as 1GiB.")] = "1GiB",
    block: Annotated[str, typer.Option(help="Of one request, as 1MiB.")] = "1MiB",
    depth: Annotated[int, typer.Option(help="Requests in flight.", min=1, max=128)] = 8,
    repeats: Repeats = 5,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Time the file queue beside fio, in turn; without fio, beside a plain loop.

    Writes the size twelve times with two backends, and as often with each of fio's engines.
    """
    from forebay.bench.nvme import NvmeSpec, bench_nvme

    with below(folder) as inside:
        spec = NvmeSpec(
            path=inside,
            nbytes=bytes_of(size) or 0,
            block_bytes=bytes_of(block) or 0,
            depth=depth,
            rounds=repeats,
        )
        found = bench_nvme(spec, progress=progress)
    give([found.table()], found.as_dict(), name="nvme", output=output, json=as_json)
    return 0


def nvme_step(  # noqa: PLR0913 - one parameter an option
    *,
    folder: Folder = Path(),
    size: Size = "1b",
    micro_batch: Micro = 8,
    sequence: Sequence = 2048,
    steps: Annotated[int, typer.Option(help="Timed updates, after two of warm-up.", min=1)] = 6,
    device: Device = "auto",
    host_budget: Annotated[
        str | None,
        typer.Option(help="Host memory for state, as 8GiB. Default: all of it is in files."),
    ] = None,
    buffers: Annotated[int, typer.Option(help="Pieces in host memory at once.", min=1)] = 8,
    block: Annotated[str, typer.Option(help="Of one request, as 1MiB.")] = "1MiB",
    depth: Annotated[int, typer.Option(help="Requests in flight.", min=1, max=128)] = 32,
    weights: Annotated[
        str, typer.Option(help="Where weights are: device, or nvme too.")
    ] = "device",
    peer_seconds: Annotated[
        int,
        typer.Option(help="DeepSpeed's offload to files beside it, this long at most; 0: not."),
    ] = 0,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Time steps with optimizer state in files beside computing, reading and writing alone.

    Writes the state once and once for each step, and 22 GiB to measure the drive.
    """
    from forebay.bench.nvme_step import NvmeStepSpec, bench_nvme_step
    from forebay.links.host_nvme import FileAccess

    if weights not in ("device", "nvme"):
        raise typer.BadParameter(f"{weights} is neither device nor nvme", param_hint="--weights")
    spec = NvmeStepSpec(
        path=folder,
        size=size,
        micro_batch=micro_batch,
        sequence=sequence,
        steps=steps,
        device=device_of(device),
        host_budget=bytes_of(host_budget),
        buffer_count=buffers,
        access=FileAccess(block_bytes=bytes_of(block) or 0, queue_depth=depth),
        weights=weights,
        peer_seconds=peer_seconds,
    )
    found = bench_nvme_step(spec, progress=progress)
    give([found.table()], found.as_dict(), name=f"nvme-step-{size}", output=output, json=as_json)
    return 0
