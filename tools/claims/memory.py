"""Bytes: what lies where, what moves, what fits, and at which bandwidth."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from claims.rows import V100, WORK, Kind, Row, fits, largest, setup_of, state_bytes
from forebay.hardware.catalog import CATALOG
from forebay.plan.compute import compute_seconds
from forebay.plan.model_config import from_counts
from forebay.plan.placement import UpdatePlace
from forebay.plan.program import Lane, build_program
from forebay.plan.setup import Cluster, Home
from forebay.plan.step import rank_rates, rank_units
from forebay.plan.systems import DDP, L2L_TRAFFIC, ZERO, ZERO_INFINITY, ZERO_OFFLOAD
from forebay.plan.tiers import placement_of, tier_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator


def memory_rows() -> Iterator[Row]:
    """Stage formulas."""
    shape = from_counts(7_500_000_000)
    for stage, gigabytes in enumerate((120.0, 31.4, 16.6, 1.88)):
        setup = setup_of(stage, cluster=(16, 4), habits=ZERO)
        yield Row(
            name=f"7.5B on 64 devices, stage {stage}",
            published=gigabytes,
            predicted=state_bytes(shape, setup) / 1e9,
            kind=Kind.CAPACITY,
            unit="GB",
        )
    shape = from_counts(13_000_000_000)
    # with state on the host what is left of it on a device; one token, nothing in passing
    work = replace(WORK, micro_batch=1, sequence=1)
    device = tier_bytes(shape, setup_of(2, work=work, cluster=(8, 1), habits=ZERO)).device
    weights, gradients = device["lp_params"], device["lp_grads"]
    state = device["hp_params"] + device["optim_states"]
    for words, nbytes, gigabytes in (
        ("stage 2", weights + gradients + state, 49.0),
        ("stage 2, optimizer on the host", weights + gradients, 29.0),
    ):
        yield Row(
            name=f"13B on 8 devices, {words}",
            published=gigabytes,
            predicted=nbytes / 1e9,
            kind=Kind.CAPACITY,
            unit="GB",
        )
    host = tier_bytes(shape, setup_of(2, Home.HOST, habits=replace(ZERO_OFFLOAD, host_bytes=16)))
    yield Row(
        name="13B, host memory at 16 bytes per parameter",
        published=208.0,
        predicted=host.total("host") / 1e9,
        kind=Kind.CAPACITY,
        unit="GB",
    )


def traffic_rows() -> Iterator[Row]:
    """Bytes per parameter and update over one device's link, from the engine's program."""
    shape = from_counts(1_000_000_000)
    setup = setup_of(2, Home.HOST)
    placement = placement_of(shape, setup, places=[UpdatePlace.HOST] * (shape.layers + 2))
    program = build_program(placement, order=range(len(placement.units)))
    moved = program.traffic(Lane.UP) + program.traffic(Lane.DOWN)
    yield Row(
        name="state and gradients on the host",
        published=4.0,
        predicted=moved / shape.parameters,
        kind=Kind.EXACT,
        unit="M",
    )
    streamed = setup_of(3, Home.HOST, Home.HOST)
    compute = compute_seconds(shape, workload=WORK, profile=V100)
    units = rank_units(shape, streamed, compute=compute)
    yield Row(
        name="weights there too: up for forward and for backward",
        published=6.0,
        predicted=sum(2 * u.own_weights + u.own_gradients for u in units) / shape.parameters,
        kind=Kind.EXACT,
        unit="M",
    )
    yield Row(
        name="layer to layer (L2L)",
        published=28.0,
        predicted=float(L2L_TRAFFIC),
        kind=Kind.EXACT,
        unit="M",
    )
    one_token = replace(WORK, micro_batch=1, sequence=1)
    resident = tier_bytes(shape, setup_of(0, work=one_token)).device
    offloaded = tier_bytes(shape, setup).device
    for words, published, found in (
        ("fp32 state", 4.0, resident["lp_params"] + resident["lp_grads"]),
        ("gradients too", 2.0, offloaded["lp_params"]),
    ):
        yield Row(
            name=f"bytes per parameter that stay on the device, {words} on the host",
            published=published,
            predicted=found / shape.parameters,
            kind=Kind.CAPACITY,
            unit="M",
        )


def capacity_rows() -> Iterator[Row]:
    """The largest models."""
    yield Row(
        name="largest model on one V100, PyTorch DDP",
        published=1.4,
        predicted=largest(setup_of(0, habits=DDP)),
        kind=Kind.CAPACITY,
        unit="B",
    )
    yield Row(
        name="largest model on one V100, ZeRO-Offload",
        published=13.0,
        predicted=largest(setup_of(2, Home.HOST, habits=ZERO_OFFLOAD)),
        kind=Kind.CAPACITY,
        unit="B",
    )
    sliced = replace(WORK, tensor_parallel=16)
    yield Row(
        name="largest model on a DGX-2, ZeRO-Offload with model parallelism",
        published=70.0,
        predicted=largest(
            setup_of(2, Home.HOST, work=sliced, cluster=(16, 1), habits=ZERO_OFFLOAD)
        ),
        kind=Kind.CAPACITY,
        unit="B",
    )
    one = replace(WORK, micro_batch=1)
    drives = (3, Home.NVME, Home.NVME)
    trillion = from_counts(10**12, hidden=25600)
    yield Row(
        name="1T on one DGX-2 with drives",
        published="fits",
        predicted=fits(
            trillion, setup_of(*drives, work=one, cluster=(16, 1), habits=ZERO_INFINITY)
        ),
        kind=Kind.ORDERING,
    )
    huge = from_counts(32 * 10**12, hidden=90112)
    on_32 = setup_of(*drives, work=one, cluster=(16, 32), habits=ZERO_INFINITY)
    yield Row(
        name="32T on 512 V100 with drives",
        published="fits",
        predicted=fits(huge, on_32),
        kind=Kind.ORDERING,
    )


def bandwidth_rows() -> Iterator[Row]:
    """What a node's and a cluster's links and drives give."""
    every = setup_of(3, Home.NVME, Home.NVME, cluster=(16, 1))
    alone = rank_rates(V100, replace(every, cluster=Cluster())).up
    rates = rank_rates(V100, every)
    for name, gigabytes, found in (
        ("host to device, one link of a DGX-2", 12.0, alone),
        ("host to devices, all links of a DGX-2", 48.0, 16 * rates.up),
        ("drives to devices, a DGX-2", 25.0, 16 * rates.read),
        ("host to devices, 64 nodes", 3000.0, 64 * 16 * rates.up),
        ("drives to devices, 64 nodes", 1500.0, 64 * 16 * rates.read),
    ):
        yield Row(
            name=name,
            published=gigabytes,
            predicted=found / 1e9,
            kind=Kind.THROUGHPUT,
            unit="GB/s",
        )
    gradients = 2 * from_counts(7_500_000_000).parameters
    yield Row(
        name="gradients of 7.5B over PCIe 4",
        published=0.5,
        predicted=gradients / CATALOG["a100-40"].link.down,
        kind=Kind.THROUGHPUT,
        unit="s",
    )
