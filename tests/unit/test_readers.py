"""Who still reads a unit's state: waits, and what ends them."""

from __future__ import annotations

import threading

import pytest

from forebay.comm.together import Together
from forebay.engine.readers import Readers
from forebay.errors import CheckpointError, RankError

_ALONE = Together(None, otherwise=CheckpointError)


def test_whoever_waits_hears_that_a_rank_is_gone_and_nobody_reads_on():
    def gone():
        raise RankError("rank 1 of 2 is gone", hint="look there")

    readers = Readers([0, 1], together=_ALONE, check=gone)
    with pytest.raises(RankError, match="rank 1 of 2 is gone"):
        readers.meet()
    with pytest.raises(RankError, match="rank 1 of 2 is gone") as found:
        readers.done(0)
    assert found.value.hint == "look there"
    readers.finish()
    readers.wait(1)


def test_a_wait_counts_while_it_lasts():
    readers = Readers([3], together=_ALONE, check=lambda: None)
    readers.of(2).wait()
    waiting = threading.Thread(target=readers.meet)
    waiting.start()
    while not readers.waited_seconds > 0.05:
        waiting.join(0.01)
    readers.done(3)
    waiting.join(10)
    assert not waiting.is_alive()
    readers.of(3).wait()
