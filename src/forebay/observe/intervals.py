"""From what was heard of a step to intervals: pure functions over stamps and tickets' times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from forebay.links.observer import Moment
from forebay.observe.records import Phase, StepRecord
from forebay.plan.program import Lane
from forebay.plan.timeline import Interval, Row, Timeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from forebay.observe.clock import Clock

__all__ = ["Marked", "Submitted", "Waited", "build_record"]

_ROWS = {
    Lane.DOWN: Row.DOWN,
    Lane.UP: Row.UP,
    Lane.HOST: Row.HOST_UPDATE,
    Lane.READ: Row.READ,
    Lane.WRITE: Row.WRITE,
}
_LINKS = (Row.DOWN, Row.UP)
_PHASES = {
    Moment.FORWARD_BEGIN: ("forward", Moment.FORWARD_END),
    Moment.BACKWARD_BEGIN: ("backward", Moment.BACKWARD_END),
    Moment.STEP_BEGIN: ("step", Moment.STEP_END),
}


class Marked(NamedTuple):
    """A moment and its stamp."""

    moment: Moment
    unit: str
    stamp: Any


class Waited(NamedTuple):
    """A wait and its two stamps."""

    what: str
    begin: Any
    end: Any


class Submitted(NamedTuple):
    """A ticket; its stamp is a point that the compute stream passes before a link may begin."""

    lane: Lane
    name: str
    ticket: Any
    nbytes: int
    stamp: Any


@dataclass(slots=True)
class _Open:
    """The stretch of computation that runs now."""

    name: str = ""
    begin: float = 0.0

    def cut(self, now: float) -> Iterator[Interval]:
        """What has been computed until now; the stretch goes on from here."""
        if self.name and now > self.begin:
            yield Interval(row=Row.COMPUTE, begin=self.begin, end=now, name=self.name)
        self.begin = now


def build_record(
    step: int, heard: Sequence[Marked | Waited | Submitted], *, end: Any, clock: Clock
) -> StepRecord | None:
    """The record of one step; None when nothing was computed in it.

    Args:
        step: Its number.
        heard: What was heard, in order.
        end: The stamp at which the next step begins.
        clock: What reads the stamps.
    """

    def seconds(stamp: Any) -> float:
        return clock.nanoseconds(stamp) * 1e-9

    marks = [(m.moment, m.unit, seconds(m.stamp)) for m in heard if isinstance(m, Marked)]
    if not marks:
        return None
    intervals = list(_computed(heard, seconds))
    for row in _ROWS.values():
        intervals += _moved(row, [s for s in heard if isinstance(s, Submitted)], seconds)
    agreed = next((at for moment, _, at in marks if moment is Moment.AGREED), None)
    return StepRecord(
        step=step,
        begin=marks[0][2],
        end=seconds(end),
        agreed=agreed,
        phases=tuple(_phases(marks)),
        timeline=Timeline.of(f"step {step}", intervals),
    )


def _phases(marks: Iterable[tuple[Moment, str, float]]) -> Iterator[Phase]:
    begun: dict[Moment, tuple[str, float]] = {}
    for moment, _, at in marks:
        if moment in _PHASES:
            name, until = _PHASES[moment]
            begun[until] = (name, at)
        elif moment in begun:
            name, begin = begun.pop(moment)
            yield Phase(name=name, begin=begin, end=at)


def _computed(heard: Iterable[Marked | Waited | Submitted], seconds: Any) -> Iterator[Interval]:
    """Compute by unit, updates on the device, and waits, which interrupt both."""
    open_ = _Open()
    update_began = 0.0
    for said in heard:
        if isinstance(said, Waited):
            begin, end = seconds(said.begin), seconds(said.end)
            yield from open_.cut(begin)
            open_.begin = end
            if end > begin:
                yield Interval(row=Row.WAIT, begin=begin, end=end, name=said.what)
        elif isinstance(said, Marked):
            now = seconds(said.stamp)
            if said.moment is Moment.UPDATE_BEGIN:
                update_began = now
            elif said.moment is Moment.UPDATE_END:
                name = f"update {said.unit}"
                yield Interval(row=Row.DEVICE_UPDATE, begin=update_began, end=now, name=name)
            else:
                yield from _moment(open_, said, now)


def _moment(open_: _Open, said: Marked, now: float) -> Iterator[Interval]:
    moment, unit = said.moment, said.unit
    if moment is Moment.UNIT_END:
        open_.name = f"backward {unit}"
    yield from open_.cut(now)
    names = {
        Moment.FORWARD_BEGIN: "forward",
        Moment.UNIT_BEGIN: f"forward {unit}",
        Moment.BACKWARD_BEGIN: "backward",
        Moment.UNIT_END: "backward",
    }
    open_.name = names.get(moment, "")


def _moved(row: Row, submitted: Iterable[Submitted], seconds: Any) -> list[Interval]:
    """The pieces of all tickets of one row.

    A link serves one piece after the other; what lies in its queue, or waits there for the
    compute stream, has not begun.
    """
    pieces: list[Interval] = []
    for said in submitted:
        if _ROWS[said.lane] is not row:
            continue
        times = said.ticket.times()
        earliest = seconds(said.stamp) if row in _LINKS else 0.0
        for number, (begin_ns, end_ns) in enumerate(times):
            share = _share(said.nbytes, number, len(times))
            begin, end = max(begin_ns * 1e-9, earliest), end_ns * 1e-9
            if end_ns:
                pieces.append(
                    Interval(row=row, begin=min(begin, end), end=end, name=said.name, nbytes=share)
                )
    if row not in _LINKS:
        return pieces
    pieces.sort(key=lambda piece: piece.end)
    served: list[Interval] = []
    free = 0.0
    for piece in pieces:
        served.append(
            Interval(
                row=row,
                begin=min(max(piece.begin, free), piece.end),
                end=piece.end,
                name=piece.name,
                nbytes=piece.nbytes,
            )
        )
        free = piece.end
    return served


def _share(nbytes: int, piece: int, pieces: int) -> int:
    """Equal shares that add up to all bytes; the pieces of a copy are of almost equal size."""
    return nbytes * (piece + 1) // pieces - nbytes * piece // pieces
