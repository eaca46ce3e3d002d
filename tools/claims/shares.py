"""What ranks share: a node's links, memory and cores; and what larger clusters hold without it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from claims.rows import V100, WORK, Kind, Row, largest, setup_of
from forebay.hardware.catalog import CATALOG
from forebay.plan.advice import offload_worth
from forebay.plan.choose import choose
from forebay.plan.model_config import from_counts
from forebay.plan.program import Lane, build_program
from forebay.plan.setup import FOREBAY, Cluster, Home, Overlap
from forebay.plan.simulate import ComputeSeconds
from forebay.plan.step import rank_rates, rank_units, step_forecast
from forebay.plan.systems import DDP, ZERO_2, ZERO_INFINITY, ZERO_OFFLOAD, efficiency
from forebay.plan.tiers import capacity, placement_of, tier_bytes
from forebay.plan.ways import Question
from forebay.plan.workload import OPTIMIZERS, Precision, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.model.shape import ModelShape
    from forebay.plan.setup import Habits


def format_rows() -> Iterator[Row]:
    """Bytes of state per parameter, where masters are 16 bits and where the host holds it."""
    for words, name, published in (
        ("16-bit masters and moments", "adamw-16bit", 6.0),
        ("16-bit masters, fp32 moments", "adamw-16bit-fp32-momentum", 10.0),
    ):
        state = OPTIMIZERS[name]
        master = 2 if state.sixteen_bit_master else 4
        yield Row(
            name=f"state per parameter, {words}",
            published=published,
            predicted=float(master + state.moments),
            kind=Kind.EXACT,
            unit="bytes",
        )
    shape = from_counts(8_000_000_000)
    found = [
        tier_bytes(shape, setup_of(2, Home.HOST, work=Workload(accumulation=count))).total("host")
        / shape.parameters
        for count in (1, 4)
    ]
    yield Row(
        name="host memory per parameter, at most 16 to 20 bytes",
        published="14 to 16",
        predicted=all(13.9 < one < 16.1 for one in found),
        kind=Kind.ORDERING,
        note=f"{found[0]:.2f} with one backward, {found[1]:.2f} with sums",
    )


def ratio_rows() -> Iterator[Row]:
    """A DGX-2 against other ways to train on it; L2L's limit is in no paper that we know."""
    one = largest(setup_of(2, Home.HOST, habits=ZERO_OFFLOAD))
    plain = largest(setup_of(0, habits=DDP))
    sliced = replace(WORK, tensor_parallel=16)
    whole = (16, 1)
    seventy = largest(setup_of(2, Home.HOST, work=sliced, cluster=whole, habits=ZERO_OFFLOAD))
    megatron = largest(setup_of(0, work=sliced, cluster=whole, habits=replace(DDP, device_extra=4)))
    two = largest(setup_of(2, cluster=whole, habits=ZERO_2))
    for name, published, found in (
        ("ZeRO-Offload on one V100 against PyTorch DDP", 9.0, one / plain),
        ("ZeRO-Offload on a DGX-2 against PyTorch DDP", 50.0, seventy / plain),
        ("ZeRO-Offload on a DGX-2 against Megatron-LM", 4.5, seventy / megatron),
        ("ZeRO-Offload on a DGX-2 against ZeRO-2", 7.8, seventy / two),
    ):
        yield Row(name=name, published=published, predicted=found, kind=Kind.CAPACITY, unit="times")


def _down(shape: ModelShape, devices: int) -> int:
    """Gradient bytes that all ranks of a node send to the host in an update."""
    placement = placement_of(shape, setup_of(2, Home.HOST, cluster=(devices, 1)))
    program = build_program(placement, order=range(len(placement.units)))
    return devices * program.traffic(Lane.DOWN)


def share_rows() -> Iterator[Row]:
    """Several ranks of a node, and several nodes."""
    shape = from_counts(1_000_000_000)
    totals = [_down(shape, devices) for devices in (2, 4, 16)]
    yield Row(
        name="gradients to the host of all ranks, 2 to 16 devices",
        published="does not grow",
        predicted=max(totals) < 1.01 * min(totals),
        kind=Kind.ORDERING,
        note=", ".join(f"{total / shape.parameters:.2f} M" for total in totals),
    )
    alone, shared = (
        rank_rates(V100, setup_of(2, Home.HOST, cluster=(devices, 1))) for devices in (1, 16)
    )
    yield Row(
        name="host bandwidth of a rank on a DGX-2, of the node's",
        published=1 / 16,
        predicted=shared.host_memory / alone.host_memory,
        kind=Kind.EXACT,
    )
    updates = []
    for nodes in (1, 4):
        setup = setup_of(2, Home.HOST, cluster=(16, nodes))
        work = sum(one.update for one in rank_units(shape, setup, compute=_no_compute(shape)))
        updates.append(work / rank_rates(V100, setup).update)
    yield Row(
        name="update on the host, 4 nodes against one",
        published=0.25,
        predicted=updates[1] / updates[0],
        kind=Kind.CAPACITY,
        unit="times",
    )
    every = rank_rates(V100, setup_of(3, Home.NVME, Home.NVME, cluster=(16, 1)))
    for name, published, found in (
        ("host to device, each of 16", 3.0, every.up),
        ("drives to device, each of 16", 1.6, every.read),
    ):
        yield Row(
            name=name,
            published=published,
            predicted=found / 1e9,
            kind=Kind.THROUGHPUT,
            unit="GB/s",
        )
    for hidden in (32, 64):
        share = efficiency(ait=24 * 1024 * hidden, bandwidth=1e9, peak=70e12)
        yield Row(
            name=f"activation checkpoints over 1 GB/s at hidden size {hidden}K",
            published="almost no effect",
            predicted=share > 0.9,
            kind=Kind.ORDERING,
            note=f"{share:.0%} of the peak",
        )


def _no_compute(shape: ModelShape) -> ComputeSeconds:
    zeros = (0.0,) * len(shape.unit_elements())
    return ComputeSeconds(forward=zeros, backward=zeros)


def ladder_rows() -> Iterator[Row]:
    """The bandwidths that documents tell to plan with."""
    for name, machine, published in (
        ("PCIe 3 x16", "v100-32", 12.0),
        ("PCIe 4 x16", "4090", 25.0),
        ("PCIe 5 x16", "h100", 55.0),
        ("NVLink-C2C", "gh200", 350.0),
    ):
        yield Row(
            name=f"host to device, {name}",
            published=published,
            predicted=CATALOG[machine].link.up / 1e9,
            kind=Kind.THROUGHPUT,
            unit="GB/s",
        )
    drives = [one.drives for one in CATALOG.values() if one.drives is not None]
    slow, fast = (one.write / one.count for one in drives), (one.read / one.count for one in drives)
    yield Row(
        name="each drive of every catalogued machine",
        published="2 to 7 GB/s",
        predicted=min(slow) >= 2e9 and max(fast) <= 7e9,
        kind=Kind.ORDERING,
    )
    memory = [CATALOG[name].device_memory or 0.0 for name in ("a100-40", "a100-80", "h100")]
    yield Row(
        name="memory of an A100 and of an H100",
        published="1 to 3 TB/s",
        predicted=all(1e12 <= one <= 3e12 for one in memory),
        kind=Kind.ORDERING,
    )


def _pace(shape: ModelShape, machine: str, *, habits: Habits, **setup: object) -> float:
    """Tokens per second of a device."""
    made = setup_of(3, habits=habits, **setup)  # type: ignore[arg-type]
    seconds = step_forecast(shape, made, profile=CATALOG[machine]).seconds
    return made.workload.tokens_per_update / seconds


def thumb_rows() -> Iterator[Row]:
    """Rules of thumb of documents.

    They do not say what they compare with: here it is twice or four times the devices without
    offload, on which the model fits.
    """
    work = Workload(micro_batch=4, sequence=2048, precision=Precision.BF16)
    seventy = from_counts(70_000_000_000, hidden=8192)
    both = {"optimizer": Home.HOST, "weights": Home.HOST, "work": work, "cluster": (8, 1)}
    late = replace(FOREBAY, name="DeepSpeed", update=Overlap.AFTER, update_traffic=44)
    without = _pace(seventy, "a100-80", habits=late, work=work, cluster=(8, 2))
    slower = without / _pace(seventy, "a100-80", habits=late, **both) - 1
    yield Row(
        name="70B on 8 A100 with both offloads, slower than without",
        published="30 to 60%",
        predicted=0.3 <= slower <= 0.6,
        kind=Kind.ORDERING,
        note=f"{slower:.0%} at 4 x 2048 tokens a device",
    )
    thirteen = from_counts(13_000_000_000)
    four = {"optimizer": Home.NVME, "weights": Home.DEVICE, "work": WORK, "cluster": (4, 1)}
    share = _pace(thirteen, "v100-32", habits=ZERO_INFINITY, **four) / _pace(
        thirteen, "v100-32", habits=ZERO_INFINITY, work=WORK, cluster=(16, 1)
    )
    yield Row(
        name="13B on 4 V100 with drives, of the throughput without",
        published=1 / 3,
        predicted=share,
        kind=Kind.THROUGHPUT,
    )
    question = Question(
        shape=from_counts(3_000_000_000),
        profile=CATALOG["4090"],
        cluster=Cluster(),
        workload=replace(work, optimizer="sgd"),
    )
    yield Row(
        name="offload with SGD",
        published="gains little",
        predicted="little" in offload_worth(choose(question)).sentence,
        kind=Kind.ORDERING,
    )


def whole_state_rows() -> Iterator[Row]:
    """3D parallelism: 20 bytes per parameter (see `systems.DDP`) over all devices, nothing else."""
    each = capacity(V100).device
    yield Row(
        name="largest model on 512 V100, 3D parallelism",
        published=650.0,
        predicted=512 * each / 20 / 1e9,
        kind=Kind.CAPACITY,
        unit="B",
        note="activations and uneven stages are not in it",
    )
    yield Row(
        name="32T on 512 V100 against the largest there with 3D parallelism",
        published=50.0,
        predicted=32e12 / (512 * each / 20),
        kind=Kind.CAPACITY,
        unit="times",
    )
    yield Row(
        name="V100s that hold 1T, 3D parallelism",
        published=800.0,
        predicted=1e12 * 20 / each,
        kind=Kind.CAPACITY,
        note="activations and uneven stages are not in it",
    )
