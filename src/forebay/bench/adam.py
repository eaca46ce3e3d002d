"""The native update pass against `torch.optim.AdamW(fused=True)` and against a plain copy.

All of them move bytes of host memory, so they are compared by bytes per second: a copy of the
same memory is the least that any pass over it costs. Contestants take turns within each round,
so that a busy neighbour slows all of them.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from forebay import native
from forebay.bench.tables import Table
from forebay.hardware.affinity import Topology
from forebay.probe.measuring import thread_counts
from forebay.probe.workload import (
    BYTES_PER_PARAMETER,
    PartState,
    Run,
    copy_runs,
    middle,
    timed,
    update_runs,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["AdamBench", "AdamRow", "bench_adam"]

_FP32 = BYTES_PER_PARAMETER["whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamRow:
    """One contestant with one number of threads.

    Attributes:
        contestant: Its name.
        threads: Threads.
        nbytes: Host memory traffic of one pass.
        elements: Parameters of one pass; 0 for the copy.
        runs: What each repeat took.
    """

    contestant: str
    threads: int
    nbytes: int
    elements: int
    runs: tuple[Run, ...]

    @property
    def rate(self) -> float:
        """Bytes per second, median."""
        return self.nbytes / middle(self.runs)

    @property
    def best(self) -> float:
        """Bytes per second of the fastest repeat: nearest to what the machine can do."""
        return self.nbytes / min(run.seconds for run in self.runs)

    @property
    def work_rate(self) -> float:
        """Bytes per second of processor time, median: what counts where others use the cores."""
        return self.nbytes / statistics.median(run.processor_seconds for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamBench:
    """All rows.

    Attributes:
        kernel_level: Level of the native kernels.
        elements: Parameters.
        repeats: Repeats behind each median.
        rows: By thread count, then contestant.
    """

    kernel_level: str
    elements: int
    repeats: int
    rows: tuple[AdamRow, ...]

    def table(self) -> Table:
        """With each rate against torch's and the copy's at the same number of threads."""
        by = {(row.contestant, row.threads): row for row in self.rows}
        lines = []
        for row in self.rows:
            torch_row, copy_row = by["torch fused", row.threads], by["copy", row.threads]
            lines.append(
                (
                    str(row.threads),
                    row.contestant,
                    f"{row.rate / 1e9:.1f}",
                    f"{row.best / 1e9:.1f}",
                    f"{row.elements / middle(row.runs) / 1e9:.2f}",
                    f"{row.rate / torch_row.rate:.2f}",
                    f"{row.rate / copy_row.rate:.2f}",
                    f"{row.work_rate / 1e9:.1f}",
                    f"{row.work_rate / torch_row.work_rate:.2f}",
                )
            )
        return Table(
            title="AdamW on the host: one fused pass",
            head=(
                "threads",
                "contestant",
                "GB/s median",
                "GB/s best",
                "Gparam/s",
                "of torch per byte",
                "of a copy per byte",
                "GB per processor second",
                "of torch",
            ),
            rows=tuple(lines),
            notes=(
                f"{self.elements} parameters, kernels of level {self.kernel_level}, one warm-up "
                f"and {self.repeats} rounds in which the contestants take turns.",
                "native fp32 and torch fused read and write 28 bytes per parameter, native split "
                "(bf16 weights, 16 more bits beside them) 26; the copy moves bytes of the same "
                "memory.",
                "The last two columns count the seconds in which threads worked, whoever else used "
                "the cores meanwhile.",
            ),
        )

    def as_dict(self) -> dict[str, Any]:
        """All numbers."""
        return asdict(self)


def bench_adam(
    *,
    elements: int = 32 << 20,
    repeats: int = 9,
    threads: Sequence[int] | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> AdamBench:
    """Measure.

    Args:
        elements: Parameters; state of 16 bytes each must be far more than caches hold.
        repeats: Rounds.
        threads: Numbers of threads; None for 1, 2, 4, ... up to this process's cores.
        progress: Told what is measured.
    """
    core = native.core()
    share = Topology.read().share(reserve_for_launch=0)
    chosen = list(threads or thread_counts(share.threads))
    before = torch.get_num_threads()
    rows: list[AdamRow] = []
    whole = PartState(core, layout="whole", elements=elements)
    split = PartState(core, layout="split", elements=elements)
    try:
        for count in chosen:
            progress(f"{count} threads")
            torch.set_num_threads(count)
            rows += _round_robin(
                {
                    "native fp32": (whole.traffic, elements, _native(core, whole, share, count)),
                    "native split": (split.traffic, elements, _native(core, split, share, count)),
                    "torch fused": (_FP32 * elements, elements, _torch(whole)),
                    "copy": (whole.arena.nbytes, 0, _copy(core, whole, count)),
                },
                threads=count,
                repeats=repeats,
            )
    finally:
        torch.set_num_threads(before)
        whole.close()
        split.close()
    return AdamBench(
        kernel_level=core.kernel_level(), elements=elements, repeats=repeats, rows=tuple(rows)
    )


def _round_robin(
    contestants: dict[str, tuple[int, int, Callable[[], Run]]], *, threads: int, repeats: int
) -> list[AdamRow]:
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, (_nbytes, _elements, once) in contestants.items():
            runs[name].append(once())
    return [
        AdamRow(
            contestant=name,
            threads=threads,
            nbytes=nbytes,
            elements=elements,
            runs=tuple(runs[name]),
        )
        for name, (nbytes, elements, _once) in contestants.items()
    ]


def _native(core: Any, part: PartState, share: Any, threads: int) -> Callable[[], Run]:
    return lambda: update_runs(core, part, cpus=share.cpus, threads=threads, repeats=1)[0]


def _copy(core: Any, part: PartState, threads: int) -> Callable[[], Run]:
    return lambda: copy_runs(core, part, threads=threads, repeats=1)[0]


def _torch(part: PartState) -> Callable[[], Run]:
    """The optimizer of torch on the very same memory; its numbers change, its speed does not."""
    param = torch.nn.Parameter(part.master)
    optimizer = torch.optim.AdamW([param], lr=1e-4, weight_decay=0.1, fused=True)
    optimizer.state[param] = {
        "step": torch.tensor(1.0),
        "exp_avg": part.exp_avg,
        "exp_avg_sq": part.exp_avg_sq,
    }

    def _step() -> None:
        param.grad = part.grad
        optimizer.step()

    return lambda: timed(_step, repeats=1)[0]
