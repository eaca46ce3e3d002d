"""Benchmarks: the same work for forebay and others, in turn, beside the machine's own limits."""

from __future__ import annotations

from forebay.bench.adam import AdamBench, bench_adam
from forebay.bench.checkpoint import CheckpointBench, CheckpointSpec, bench_checkpoint
from forebay.bench.floor import Floor, floor_of
from forebay.bench.lengths_bench import LengthsBench, bench_lengths
from forebay.bench.nvme import NvmeBench, NvmeSpec, bench_nvme
from forebay.bench.nvme_step import NvmeStepBench, NvmeStepSpec, bench_nvme_step
from forebay.bench.reads_bench import ReadsBench, bench_reads
from forebay.bench.spec import StepSpec
from forebay.bench.step import StepBench, bench_step
from forebay.bench.tables import Table

__all__ = [
    "AdamBench",
    "CheckpointBench",
    "CheckpointSpec",
    "Floor",
    "LengthsBench",
    "NvmeBench",
    "NvmeSpec",
    "NvmeStepBench",
    "NvmeStepSpec",
    "ReadsBench",
    "StepBench",
    "StepSpec",
    "Table",
    "bench_adam",
    "bench_checkpoint",
    "bench_lengths",
    "bench_nvme",
    "bench_nvme_step",
    "bench_reads",
    "bench_step",
    "floor_of",
]
