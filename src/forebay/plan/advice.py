"""What would change the answer: one more GiB, drive or device, and what makes a plan feasible."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forebay.plan.choose import Way, choose
from forebay.plan.setup import Cluster, Home
from forebay.plan.workload import Recompute

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forebay.hardware.profile import Node, Profile
    from forebay.plan.choose import Choice, Question

__all__ = ["Change", "OffloadWorth", "margins", "nearest_changes", "offload_worth"]

_GIB = 1 << 30
# Doubling devices or nodes beyond this is no advice.
_MOST_NODES = 4096
_ALIKE = 1.03
# What is short, and the share of a tier that others use (`plan.tiers`).
_ROOM = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change and what it brings.

    Attributes:
        what: In words.
        seconds: Of an update with it; None where nothing fits even so.
        saves: Share of the step that it saves; 0 where none.
    """

    what: str
    seconds: float | None
    saves: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadWorth:
    """Whether keeping state on the host pays here.

    Attributes:
        link_bytes: That one device's link moves in an update, both ways.
        link_seconds: That this takes at the link's rate, both ways at once.
        slowdown: A step with the optimizer's state on the host, over one without; None where one
            of both does not fit.
        sentence: The answer.
    """

    link_bytes: float
    link_seconds: float
    slowdown: float | None
    sentence: str


def margins(choice: Choice) -> list[Change]:
    """What one more of each thing would buy."""
    question, best = choice.question, choice.best
    if best is None:
        return []
    # What fits already and was not chosen stays as it is.
    open_ones = [Way.of(one.setup) for one in choice.all if one is best or not one.step]
    return [
        _change(what, changed, best.seconds, among=open_ones) for what, changed in _more(question)
    ]


def _change(what: str, question: Question, seconds: float, *, among: Sequence[Way]) -> Change:
    again = choose(question, among=among).best
    if again is None:
        return Change(what=what, seconds=None, saves=0.0)
    return Change(what=what, seconds=again.seconds, saves=max(0.0, 1 - again.seconds / seconds))


def _with_node(profile: Profile, **changes: int) -> Profile:
    node: Node | None = profile.node
    assert node is not None
    changed: Node = replace(node, **changes)
    return replace(profile, node=changed)


def _more(question: Question) -> Iterator[tuple[str, Question]]:
    profile, node, drives = question.profile, question.profile.node, question.profile.drives
    assert node is not None
    if profile.machine.device != "cpu":
        larger = _with_node(profile, device_bytes=node.device_bytes + _GIB)
        yield "1 GiB more on each device", replace(question, profile=larger)
    larger = _with_node(profile, host_bytes=node.host_bytes + _GIB)
    yield "1 GiB more on each host", replace(question, profile=larger)
    if drives is not None:
        faster = drives.as_many(drives.count + 1)
        yield (
            "one more drive in each node",
            replace(question, profile=replace(profile, drives=faster)),
        )


def offload_worth(choice: Choice) -> OffloadWorth:
    """Answer "is offload worth it here?"."""
    question = choice.question
    work, link = question.workload, question.profile.link
    ranks = max(1, question.cluster.devices // work.tensor_parallel)
    item = work.precision.item_bytes
    moved = 2.0 * item * question.shape.parameters / ranks
    node = question.profile.node
    assert node is not None
    share = min(1.0, node.uplinks / question.cluster.devices_per_node)
    seconds = moved / 2 / (min(link.up, link.down) * share)
    without = min(
        (one.seconds for one in choice.all if one.step and one.setup.optimizer is Home.DEVICE),
        default=None,
    )
    with_host = min(
        (one.seconds for one in choice.all if one.step and one.setup.optimizer is Home.HOST),
        default=None,
    )
    slowdown = with_host / without if with_host and without else None
    return OffloadWorth(
        link_bytes=moved,
        link_seconds=seconds,
        slowdown=slowdown,
        sentence=_worth(choice, without=without, slowdown=slowdown),
    )


def _worth(choice: Choice, *, without: float | None, slowdown: float | None) -> str:
    state = choice.question.workload.state
    if state.moments == 0:
        return (
            "No: this optimizer keeps no moments, so offload frees little but the masters; choose "
            "Adam or AdamW before paying for it."
        )
    if choice.best is None:
        return "Nothing fits here, with offload or without."
    if choice.best.setup.optimizer is Home.DEVICE:
        cost = "it would gain nothing"
        if slowdown is not None and slowdown > _ALIKE:
            cost = f"a step would take {slowdown:.2f} times as long"
        return f"No: everything fits without it, and {cost}."
    if without is None:
        return "Yes: without it nothing fits on these devices."
    return "Yes: it makes room for a larger micro-batch, which saves more than moving costs."


def nearest_changes(choice: Choice, *, most: int = 3) -> list[Change]:
    """Where nothing fits: the smallest changes that make something fit."""
    found = []
    for what, question in _easier(choice.question):
        best = choose(question).best
        if best is not None:
            found.append(Change(what=what, seconds=best.seconds, saves=0.0))
        if len(found) == most:
            break
    return found


def _easier(question: Question) -> Iterator[tuple[str, Question]]:
    work, cluster = question.workload, question.cluster
    if work.recompute is Recompute.NONE:
        easier = replace(work, recompute=Recompute.BLOCKS)
        yield "recompute activations (--recompute blocks)", replace(question, workload=easier)
    if question.free_micro_batch is None and work.micro_batch > 1:
        yield (
            "a smaller micro-batch (--micro-batch 1)",
            replace(question, workload=replace(work, micro_batch=1, accumulation=work.micro_batch)),
        )
    size = work.sequence
    while size > 128:
        size //= 2
        shorter = replace(question, workload=replace(work, sequence=size), free_micro_batch=1)
        if choose(shorter).best is not None:
            yield f"sequences of {size} tokens (--sequence {size})", shorter
            break
    yield from _larger(question)
    nodes = cluster.nodes
    while nodes < _MOST_NODES:
        nodes *= 2
        wider = replace(
            question,
            cluster=Cluster(devices_per_node=cluster.devices_per_node, nodes=nodes),
        )
        if question.profile.network is not None and choose(wider).best is not None:
            yield f"{nodes} nodes (--nodes {nodes})", wider
            break


def _larger(question: Question) -> Iterator[tuple[str, Question]]:
    """More of each tier that is short, for the setup that lacks least."""
    profile, node, drives = question.profile, question.profile.node, question.profile.drives
    assert node is not None
    short = choose(question).nearest.short
    words = []
    if "device" in short and profile.machine.device != "cpu":
        more = -(-int(short["device"] * _ROOM) // _GIB)
        profile = _with_node(profile, device_bytes=node.device_bytes + more * _GIB)
        words.append(f"devices with {more} GiB more")
    if "host" in short:
        more = -(-int(short["host"] * _ROOM) // _GIB)
        profile = _with_node(profile, host_bytes=node.host_bytes + more * _GIB)
        words.append(f"hosts with {more} GiB more")
    if "nvme" in short and drives is not None:
        more = -(-int(short["nvme"] * _ROOM) // (drives.capacity_bytes // drives.count))
        profile = replace(profile, drives=drives.as_many(drives.count + more))
        words.append(f"{more} drive{'s' if more > 1 else ''} more in each node")
    if words:
        yield " and ".join(words), replace(question, profile=profile)
