"""What a queue was busy for, from its tickets' times."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from forebay.links.busy_time import BusyTime


@dataclass
class _Ticket:
    pieces: list[tuple[int, int]]
    done: bool = True
    failed: bool = field(default=False)

    def times(self) -> list[tuple[int, int]]:
        return self.pieces


def test_what_overlaps_counts_once_and_gaps_do_not():
    busy = BusyTime()
    busy.add(_Ticket([(10, 20), (15, 30)]))
    busy.add(_Ticket([(25, 40)]))
    busy.add(_Ticket([(100, 110)]))
    assert busy.seconds == pytest.approx(40e-9)


def test_what_is_not_done_counts_later_and_in_order():
    busy = BusyTime()
    first = busy.add(_Ticket([(0, 10)], done=False))
    busy.add(_Ticket([(10, 15)]))
    assert busy.seconds == 0
    first.done = True
    assert busy.seconds == pytest.approx(15e-9)


def test_a_transfer_that_failed_has_taken_its_time():
    busy = BusyTime()
    busy.add(_Ticket([(0, 10)], done=False, failed=True))
    assert busy.seconds == pytest.approx(10e-9)
