"""Signs of life: who is named, and who stays so that the others can name them too."""

from __future__ import annotations

import logging
import threading

import pytest
from torch.distributed import HashStore

from forebay.comm import life, talk
from forebay.comm.life import Life
from forebay.comm.talk import Talk
from forebay.errors import RankError


@pytest.fixture
def signs(monkeypatch):
    """Signs of ranks 0 and 2 of three; the middle one has never been there."""
    monkeypatch.setattr(life, "_BEAT_SECONDS", 0.02)
    monkeypatch.setattr(life, "_SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(life, "_LOOK_SECONDS", 2.0)
    store = HashStore()
    made = {rank: Life(store, rank=rank, size=3) for rank in (0, 2)}
    yield made
    for one in made.values():
        one.close()


def _find(signs: Life) -> str:
    while True:
        try:
            signs.check()
        except RankError as error:
            return str(error)


@pytest.mark.parametrize("way", ["check", "fail", "explain"])
def test_rank_0_stays_until_the_living_have_found_the_dead(signs, way):
    def end() -> None:
        if way == "check":
            _find(signs[0])
        elif way == "fail":
            signs[0].fail("its own error")
        else:
            signs[0].explain(RuntimeError("closed by peer"), what="a pass")

    store_keeper = threading.Thread(target=end, daemon=True)
    store_keeper.start()
    assert not signs[2]._stop.wait(2.4)  # busy, and alive: nothing has been looked for yet
    assert store_keeper.is_alive()
    found = _find(signs[2])
    assert "rank 0" in found if way == "fail" else "rank 1 of 3 is gone" in found
    store_keeper.join(10)
    assert not store_keeper.is_alive()


def test_the_dead_are_not_waited_for(signs):
    signs[2].close()
    assert _find(signs[0]).startswith(("rank 1 of 3 is gone", "rank 2 of 3 has ended"))


def test_a_rank_that_is_waited_for_is_named_while_it_lives(signs, monkeypatch, caplog):
    monkeypatch.setattr(talk, "_TELL_SECONDS", 0.1)
    store = HashStore()
    here, there = (Talk(store, life=signs[0], rank=rank, size=2) for rank in range(2))
    monkeypatch.setattr(signs[0], "look", lambda: None)
    late = threading.Timer(0.6, there.exchange, ("late",), {"what": "saving a checkpoint"})
    late.start()
    with caplog.at_level(logging.WARNING, logger="forebay"):
        assert here.exchange("here", what="saving a checkpoint") == ["here", "late"]
    late.join()
    assert (
        "waited 0 s in saving a checkpoint, and goes on waiting, for rank 1 (alive" in caplog.text
    )


def test_a_rank_that_does_not_arrive_is_named_and_one_that_is_slow_is_not(signs):
    signs[2].doing("a step (number 3)")
    store = HashStore()
    talks = [Talk(store, life=signs[0], rank=r, size=3, limit_seconds=0.2) for r in (0, 1)]
    other = threading.Thread(target=talks[1].exchange, args=("",), kwargs={"what": "a save"})
    signs[0].look = lambda: None  # the middle one shows no sign of life here
    other.daemon = True
    other.start()
    with pytest.raises(RankError, match="waited: rank 2 was in a step") as caught:
        talks[0].arrive(what="a save")
    assert caught.value.hint == "every rank calls it at the same point"
    assert other.is_alive()
