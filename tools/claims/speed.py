"""Seconds: bandwidth that an efficiency needs, throughput, crossovers, scaling."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from claims.rows import PEAK, WORK, Kind, Row, fits, setup_of, step_of, tflops
from forebay.plan.model_config import from_counts
from forebay.plan.setup import Home, Setup
from forebay.plan.systems import DDP, ZERO_2, ZERO_INFINITY, ZERO_OFFLOAD, efficiency

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.model.shape import ModelShape


def _needed(share: float, *, ait: float, peak: float = PEAK) -> float:
    """Bandwidth at which movement leaves a share of the peak."""
    low, high = 1.0, 1e18
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (
            (middle, high)
            if efficiency(ait=ait, bandwidth=middle, peak=peak) < share
            else (low, middle)
        )
    return high


def efficiency_rows() -> Iterator[Row]:
    """ZeRO-Infinity, section 4: 8 operations a parameter and token over 8 bytes, or over 32."""
    sequence = WORK.sequence
    rows = (
        ("weights and gradients, half of the peak", 70.0, _needed(0.5, ait=sequence)),
        ("optimizer state, nine tenths, batch 2", 1500.0, _needed(0.9, ait=sequence * 2 / 4)),
        (
            "the same for each of 512 devices ten times as fast",
            30.0,
            _needed(0.9, ait=sequence * 2 / 4, peak=10 * PEAK) / 512,
        ),
    )
    for name, gigabytes, found in rows:
        yield Row(
            name=name,
            published=gigabytes,
            predicted=found / 1e9,
            kind=Kind.THROUGHPUT,
            unit="GB/s",
        )
    yield Row(
        name="activation checkpoints at hidden size 8K, half of the peak",
        published="under 1 GB/s",
        predicted=_needed(0.5, ait=24 * 8192) < 1e9,
        kind=Kind.ORDERING,
    )
    yield Row(
        name="optimizer state needs about four times the bandwidth of weights",
        published=4.0,
        predicted=_needed(0.5, ait=sequence / 4) / _needed(0.5, ait=sequence),
        kind=Kind.THROUGHPUT,
        unit="times",
    )


def device_rows() -> Iterator[Row]:
    """One V100."""
    small = from_counts(1_400_000_000)
    yield Row(
        name="1.4B on one V100, PyTorch DDP",
        published=30.0,
        predicted=tflops(small, setup_of(0, habits=DDP)),
        kind=Kind.THROUGHPUT,
        unit="TFLOPS",
    )
    ten = from_counts(10_000_000_000)
    # The paper accumulates to a batch of 512 on one device.
    work = replace(WORK, accumulation=128)
    offload = setup_of(2, Home.HOST, work=work, habits=ZERO_OFFLOAD)
    yield Row(
        name="10B on one V100, ZeRO-Offload",
        published=40.0,
        predicted=tflops(ten, offload),
        kind=Kind.THROUGHPUT,
        unit="TFLOPS",
        note='published as "over 40"',
    )
    one = replace(WORK, micro_batch=8)
    waits = step_of(small, setup_of(2, Home.HOST, work=one, habits=ZERO_OFFLOAD)).seconds
    delayed = step_of(small, setup_of(2, Home.HOST, work=one)).seconds
    yield Row(
        name="update beside the next forward and backward",
        published="faster, at most 1.5 times",
        predicted=1.0 < waits / delayed <= 1.5,
        kind=Kind.ORDERING,
    )


def _most(shape: ModelShape, setup: Setup, share: int) -> Setup | None:
    """The setup with the largest micro-batch that fits and divides a device's share."""
    for size in range(share, 0, -1):
        if share % size:
            continue
        work = replace(setup.workload, micro_batch=size, accumulation=share // size)
        tried = replace(setup, workload=work)
        if fits(shape, tried):
            return tried
    return None


def _pace(shape: ModelShape, setup: Setup | None) -> float:
    """Tokens per second; 0 where nothing fits."""
    if setup is None:
        return 0.0
    tokens = setup.workload.tokens_per_update * setup.ranks
    return tokens / step_of(shape, setup).seconds


def crossover_rows() -> Iterator[Row]:
    """10B, 512 sequences per update."""
    shape = from_counts(10_000_000_000)
    for devices, published in (
        (16, "ZeRO-2 out of memory, offload trains"),
        (32, "offload slightly ahead"),
        (64, "ZeRO-2 wins"),
        (128, "ZeRO-2 wins"),
    ):
        share = 512 // devices
        cluster = (16, devices // 16)
        two = _most(shape, setup_of(2, habits=ZERO_2, cluster=cluster), share)
        off = _most(shape, setup_of(2, Home.HOST, habits=ZERO_OFFLOAD, cluster=cluster), share)
        first, second = _pace(shape, two), _pace(shape, off)
        holds = {
            16: first == 0 < second,
            32: first < second < 1.25 * first,
        }.get(devices, first > second > 0)
        batches = ", ".join(
            f"{name} micro-batch {one.workload.micro_batch}" if one else f"{name} nothing fits"
            for name, one in (("ZeRO-2", two), ("offload", off))
        )
        ratio = f"; offload at {second / first:.3f} of ZeRO-2" if first else ""
        yield Row(
            name=f"10B on {devices} devices",
            published=published,
            predicted=holds,
            kind=Kind.ORDERING,
            note=batches + ratio,
        )


def _infinity(count: float, hidden: int, nodes: int, *, most: int = 8) -> tuple[float, Setup]:
    """TFLOPS of a device and the setup, at the largest batch whose checkpoints fit the hosts."""
    shape = from_counts(count, hidden=hidden)
    for size in range(most, 0, -1):
        work = replace(WORK, micro_batch=size)
        setup = setup_of(
            3, Home.NVME, Home.NVME, work=work, cluster=(16, nodes), habits=ZERO_INFINITY
        )
        if fits(shape, setup):
            return tflops(shape, setup), setup
    return 0.0, setup


def cluster_rows() -> Iterator[Row]:
    """512 V100; hidden sizes are the paper's (table 1)."""
    ten, ten_setup = _infinity(10e12, 65536, 32)
    twenty, twenty_setup = _infinity(20e12, 90112, 32)
    first, _ = _infinity(1e12, 25600, 32)
    yield Row(
        name="1T on 512 V100, all together",
        published=25.0,
        predicted=512 * first / 1000,
        kind=Kind.THROUGHPUT,
        unit="PFLOPS",
    )
    yield Row(
        name="1T on 512 V100, of the tensor cores' peak",
        published=0.40,
        predicted=first * 1e12 / 125e12,
        kind=Kind.THROUGHPUT,
    )
    for name, published, found, setup in (
        ("10T", 43.0, ten, ten_setup),
        ("20T", 34.0, twenty, twenty_setup),
    ):
        yield Row(
            name=f"{name} on 512 V100",
            published=published,
            predicted=found,
            kind=Kind.THROUGHPUT,
            unit="TFLOPS",
            note=f"micro-batch {setup.workload.micro_batch}: the most whose checkpoints fit",
        )
    smaller = twenty_setup.workload.micro_batch < ten_setup.workload.micro_batch
    yield Row(
        name="from 10T to 20T throughput falls, as checkpoints fill host memory",
        published="falls, with the batch",
        predicted=twenty < ten and smaller,
        kind=Kind.ORDERING,
    )
    # The same batch on every device, so that only what is shared changes.
    shape = from_counts(1e12, hidden=25600)
    work = replace(WORK, micro_batch=4)
    few, many = (
        tflops(
            shape,
            setup_of(3, Home.NVME, Home.NVME, work=work, cluster=(16, nodes), habits=ZERO_INFINITY),
        )
        for nodes in (4, 32)
    )
    yield Row(
        name="1T from 64 to 512 devices scales super-linearly",
        published="more a device",
        predicted=many > few,
        kind=Kind.ORDERING,
        note=f"{few:.1f} and {many:.1f} TFLOPS a device",
    )
