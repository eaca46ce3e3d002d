"""State that visits the device: only into memory that is there already."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from forebay.engine.room import Hole
from forebay.links import FaultScript
from forebay.plan import WeightPlace
from unit.engine_cases import CPU, PLACES, mlp, offloaded, run, same, weights

# The two blocks of the model: state of 8 bytes per element, padded to 256 elements each.
FIRST, SECOND = 8 * (256 + 256), 8 * (256 + 256)


@pytest.mark.parametrize(
    ("holes", "blocks"),
    [
        ([1 << 40], [FIRST + SECOND]),  # one block for all that fits
        ([FIRST, SECOND], [FIRST, SECOND]),  # a hole each
        ([FIRST + 8, 8], [FIRST]),  # no hole for the second: its gradient lands
        ([FIRST - 8, SECOND], []),  # in order: a unit never passes the one before it
        ([], []),
    ],
)
def test_state_goes_into_holes(monkeypatch, holes, blocks):
    expected = mlp()
    with offloaded(expected, CPU) as optimizer:
        run(expected, optimizer)
        expected_weights = weights(expected)
    model = mlp()
    with offloaded(model, PLACES["streamed"]) as optimizer:
        engine, taken = optimizer.engine, []
        block = engine._streamer._block

        def _noted(size, *, hole, units):
            taken.append(size)
            return block(size, hole=hole, units=units)

        monkeypatch.setattr(engine._room, "holes", lambda: [Hole(size) for size in holes])
        monkeypatch.setattr(engine._streamer, "_block", _noted)
        run(model, optimizer, steps=4)
        assert taken[: len(blocks)] == blocks
        assert len(taken) == 4 * len(blocks)
        assert same(weights(model), expected_weights)


def test_what_landed_after_the_step_is_let_go_in_the_next_forward(monkeypatch):
    model = mlp()
    with offloaded(model, CPU) as optimizer:
        run(model, optimizer, steps=2)
        engine = optimizer.engine
        engine.synchronize()
        held = torch.ones(4)
        gone = weakref.ref(held)
        ticket = engine.lanes.hold(engine.lanes.land([], event=0, after=[])[0], held)
        del held
        ticket.wait()
        assert gone() is not None, "nobody has asked yet"
        model(torch.ones(2, 4))
        assert gone() is None


class _SlowLink:
    """A ticket of a copy that ends when somebody waits for it."""

    done = False

    def wait(self) -> None:
        self.done = True


def test_gradients_of_the_backward_before_have_left_when_the_loss_comes():
    model = mlp()
    with offloaded(model, CPU) as optimizer:
        run(model, optimizer, steps=2)  # the order of units is known
        held, ticket = torch.ones(4), _SlowLink()
        gone = weakref.ref(held)
        optimizer.engine.lanes.hold_gradients(ticket, [held], None)
        del held
        assert gone() is not None, "the link has it"
        model(torch.ones(2, 4))
        assert ticket.done
        assert gone() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_weights_go_home_before_their_state(monkeypatch, dtype):
    """The next forward loads them from there; what it loads is new, however late copies are."""
    expected = mlp(dtype)
    with offloaded(expected, CPU) as optimizer:
        run(expected, optimizer, steps=5)
        expected_weights = weights(expected)
    away = replace(PLACES["streamed"], weights=WeightPlace.HOST, pool_bytes=0)
    late = replace(away, fault=FaultScript(seed=2, max_delay_us=800))
    model = mlp(dtype)
    with offloaded(model, late) as optimizer:
        engine, sent, followed = optimizer.engine, [], []
        land, follow = engine.lanes.land, engine._executor.publisher._source.follow_write

        def _noted(spans, *, event, after, urgent=False):
            ticket, nbytes = land(spans, event=event, after=after, urgent=urgent)
            sent.append((urgent, nbytes, ticket))
            return ticket, nbytes

        def _followed(part, ticket):
            followed.append(ticket)
            follow(part, ticket)

        monkeypatch.setattr(engine.lanes, "land", _noted)
        monkeypatch.setattr(engine._executor.publisher._source, "follow_write", _followed)
        run(model, optimizer, steps=5)
        homes = [entry for entry in sent if entry[0]]
        parts = [part for unit in engine.units for part in unit.parts]
        sizes = {part.elements * dtype.itemsize for part in parts}
        assert {nbytes for _, nbytes, _ in homes} == sizes
        assert followed == [ticket for _, _, ticket in homes]
        assert len(homes) == 5 * len(parts)
        assert same(weights(model), expected_weights)
