"""Where nothing fits: the smallest changes, of one thing or of two, after which something does.

A change is yielded when a forecast of bytes says that it fits; seconds are asked for last. Numbers
are those that a command line takes, so that a reader can plan again with what is advised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forebay.plan.choose import choose
from forebay.plan.feasible import is_feasible, lacking_least, lacks
from forebay.plan.tiers import holding
from forebay.plan.workload import Recompute
from forebay.units_of_measure import counted, format_bytes, listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forebay.plan.choose import Choice
    from forebay.plan.ways import Question

__all__ = ["NearChange", "nearest_changes"]

_GIB = 1 << 30
_MOST_CHANGES = 4
# Doubling nodes beyond this is no advice; nor is a shorter sequence.
_MOST_NODES = 4096
_LEAST_SEQUENCE = 128
# Twice the nodes that leave more than this share of what is missing do not help.
_NO_HELP = 0.99
# A smaller batch is advised beside something else where it leaves at most this share to buy.
_CLEARLY_LESS = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class NearChange:
    """A change after which something fits.

    Attributes:
        what: In words, with the options that ask for it.
        seconds: Of an update with it.
    """

    what: str
    seconds: float


def nearest_changes(choice: Choice) -> list[NearChange]:
    """Where nothing fits: the smallest changes that make something fit, a few at the most."""
    found = []
    for what, question in _easier(choice.question):
        best = choose(question).best
        if best is not None:
            found.append(NearChange(what=what, seconds=best.seconds))
        if len(found) == _MOST_CHANGES:
            break
    return found


def _easier(question: Question) -> Iterator[tuple[str, Question]]:
    """Changes that cost nothing first, then those that cost a smaller batch, then money."""
    work = question.workload
    if work.recompute is Recompute.NONE:
        again = replace(question, workload=replace(work, recompute=Recompute.BLOCKS))
        if is_feasible(again):
            yield "recompute activations (--recompute blocks)", again
    if question.free_micro_batch is None and work.micro_batch > 1:
        passes = work.micro_batch * work.accumulation
        small = replace(question, workload=replace(work, micro_batch=1, accumulation=passes))
        if is_feasible(small):
            yield "a smaller micro-batch (--micro-batch 1)", small
    smaller = list(_smaller_batches(question))
    fitting = next((one for one in smaller if is_feasible(one)), None)
    if fitting is not None:
        yield _batch_words(fitting, question), fitting
    yield from _shorter(question)
    # Of those that lack as little the largest batch: it trains fastest.
    least = min(smaller, key=lacks, default=None) if fitting is None else None
    yield from _more_memory(question, least)
    yield from _more_nodes(question, smaller if fitting is None else ())


def _smaller_batches(question: Question) -> Iterator[Question]:
    """Fewer sequences of each device in an update, all of them in one pass: no sums of several."""
    work = question.workload
    is_free = question.free_micro_batch is not None
    share = work.micro_batch * work.accumulation // 2 if is_free else work.micro_batch
    while share:
        if is_free or (share, 1) != (work.micro_batch, work.accumulation):
            one_pass = replace(work, micro_batch=share, accumulation=1)
            yield replace(question, workload=one_pass, free_micro_batch=None)
        share //= 2


def _batch_words(smaller: Question, asked: Question) -> str:
    size = smaller.workload.micro_batch
    batch = size * smaller.cluster.devices
    options = f"--batch {batch}"
    if asked.free_micro_batch is None:
        options += f" --micro-batch {size}"
    return f"{counted(batch, 'sequence')} an update, in one pass ({options})"


def _shorter(question: Question) -> Iterator[tuple[str, Question]]:
    size = question.workload.sequence
    while size > _LEAST_SEQUENCE:
        size //= 2
        shorter = replace(question, workload=replace(question.workload, sequence=size))
        if is_feasible(shorter):
            yield f"sequences of {size} tokens (--sequence {size})", shorter
            return


def _more_memory(question: Question, smaller: Question | None) -> Iterator[tuple[str, Question]]:
    """What is short bought, for the batch that is asked for and where it helps a smaller one."""
    if smaller is not None and lacks(smaller) <= _CLEARLY_LESS * lacks(question):
        what, larger = _larger(smaller)
        if what:
            yield f"{_batch_words(smaller, question)}, and {what}", larger
    what, larger = _larger(question)
    if what:
        yield what, larger


def _larger(question: Question) -> tuple[str, Question]:
    """More of each tier that is short, for the setup that lacks least."""
    profile, node, drives = question.profile, question.profile.node, question.profile.drives
    assert node is not None
    words = []
    needs = holding(profile, lacking_least(question).short)
    if "device" in needs:
        device_bytes = -(-needs["device"] // _GIB) * _GIB
        words.append(f"devices of {format_bytes(device_bytes)}")
        node = replace(node, device_bytes=device_bytes)
    if "host" in needs:
        host_bytes = -(-needs["host"] // _GIB) * _GIB
        words.append(
            f"{host_bytes // _GIB} GiB of host memory (--host-memory {host_bytes // _GIB}GiB)"
        )
        node = replace(node, host_bytes=host_bytes)
        if profile.machine.device == "cpu":
            node = replace(node, device_bytes=host_bytes)
    if "nvme" in needs and drives is not None:
        count = -(-needs["nvme"] // (drives.capacity_bytes // drives.count))
        words.append(f"{count} drives (--drives {count})")
        profile = replace(profile, drives=drives.as_many(count))
    return listed(words), replace(question, profile=replace(profile, node=node))


def _more_nodes(question: Question, smaller: Sequence[Question]) -> Iterator[tuple[str, Question]]:
    """As few as fit, with as large a batch; and as few as fit with the batch that is asked for."""
    fewest = _wider(smaller[-1]) if smaller else None
    if fewest is not None:
        nodes = fewest.cluster.nodes
        alike = (_with_nodes(one, nodes) for one in (question, *smaller))
        largest = next(one for one in alike if is_feasible(one))
        yield _nodes_words(largest), largest
        if largest.workload == question.workload:
            return
    wider = _wider(question)
    if wider is not None:
        yield _nodes_words(wider), wider


def _nodes_words(question: Question) -> str:
    work, cluster = question.workload, question.cluster
    share = work.micro_batch * work.accumulation
    batch = share * cluster.devices
    return (
        f"{cluster.nodes} such machines with {batch} sequences an update, {share} on each device "
        f"(--nodes {cluster.nodes} --batch {batch})"
    )


def _wider(question: Question) -> Question | None:
    nodes, before = question.cluster.nodes, float("inf")
    while nodes < _MOST_NODES:
        nodes *= 2
        wider = _with_nodes(question, nodes)
        missing = lacks(wider)
        if not missing:
            return wider
        if missing > _NO_HELP * before:
            return None  # what is left is no share of anything
        before = missing
    return None


def _with_nodes(question: Question, nodes: int) -> Question:
    return replace(question, cluster=replace(question.cluster, nodes=nodes))
