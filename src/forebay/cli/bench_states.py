"""`forebay bench states`."""

from __future__ import annotations

from forebay.cli.bench_options import (
    Device,
    Json,
    Limit,
    Micro,
    Output,
    OwnVariants,
    Profile,
    Sequence,
    Size,
)
from forebay.cli.bench_words import device_of, give, profile_of, progress

__all__ = ["states"]


def states(  # noqa: PLR0913 - one parameter an option
    *,
    variants: OwnVariants = "device",
    size: Size = "3b",
    micro_batch: Micro = 1,
    sequence: Sequence = 512,
    device: Device = "auto",
    profile: Profile = None,
    limit_seconds: Limit = 600.0,
    output: Output = None,
    as_json: Json = False,
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
