"""What would change the answer: one more GiB or drive; and whether offload is worth it here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forebay.plan.choose import choose
from forebay.plan.setup import Home
from forebay.plan.ways import Way

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forebay.hardware.profile import Node, Profile
    from forebay.plan.choose import Choice
    from forebay.plan.ways import Question

__all__ = ["Change", "OffloadWorth", "margins", "offload_worth"]

_GIB = 1 << 30
_ALIKE = 1.03


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
