"""Which of two ways is faster, by trying both."""

from __future__ import annotations

import itertools

import pytest

from forebay.engine.policies import trial
from forebay.engine.policies.trial import Trial

_ONE = trial._SETTLING + trial._TIMED


class _Clock:
    def __init__(self, with_it: float, without: float) -> None:
        self.now = 0.0
        self.seconds = {True: with_it, False: without}

    def __call__(self) -> float:
        return self.now

    def run(self, tried: Trial) -> bool:
        self.now += self.seconds[tried.uses]
        return tried.step()


def _until_decided(clock: _Clock, tried: Trial) -> list[bool]:
    """What each step of a trial was."""
    ways = []
    for _ in range(10_000):
        ways.append(tried.uses)
        if clock.run(tried):
            return ways
    raise AssertionError("no decision")


@pytest.mark.parametrize(("with_it", "without"), [(1.0, 1.2), (1.2, 1.0)])
def test_the_faster_way_stays(with_it, without):
    clock = _Clock(with_it, without)
    tried = Trial(clock=clock)
    ways = _until_decided(clock, tried)
    assert ways == [True] * (trial._WARM_UP + _ONE) + [False] * _ONE
    assert tried.uses is (with_it < without)
    assert tried.seconds == pytest.approx({True: with_it, False: without})


def test_it_is_tried_again_and_may_change():
    clock = _Clock(2.0, 1.0)
    tried = Trial(clock=clock)
    _until_decided(clock, tried)
    clock.seconds[True] = 0.5
    ways = _until_decided(clock, tried)
    assert ways == [False] * trial._BETWEEN + [True] * _ONE + [False] * _ONE
    assert tried.uses


def test_one_slow_step_decides_nothing():
    clock = _Clock(1.0, 1.1)
    tried = Trial(clock=clock)
    for number in itertools.count():
        clock.now += 100.0 * (number == trial._WARM_UP + trial._SETTLING + 1)
        if clock.run(tried):
            break
    assert tried.uses


def test_an_interrupted_trial_begins_again():
    clock = _Clock(1.0, 2.0)
    tried = Trial(clock=clock)
    for _ in range(trial._WARM_UP + _ONE + 3):
        assert not clock.run(tried)
    clock.now += 50.0
    tried.interrupt()
    assert _until_decided(clock, tried) == [True] * _ONE + [False] * _ONE
    assert tried.seconds == pytest.approx({True: 1.0, False: 2.0})
