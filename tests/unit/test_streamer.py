"""State that visits the device: only into memory that is there already."""

from __future__ import annotations

import weakref

import pytest
import torch

from forebay.engine.room import Hole
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
