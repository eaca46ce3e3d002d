"""State that visits the device: only into memory that is there already."""

from __future__ import annotations

import pytest

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

        def _noted(size, what):
            taken.append(size)
            return block(size, what)

        monkeypatch.setattr(engine._room, "holes", lambda: list(holes))
        monkeypatch.setattr(engine._streamer, "_block", _noted)
        run(model, optimizer, steps=4)
        assert taken[: len(blocks)] == blocks
        assert len(taken) == 4 * len(blocks)
        assert same(weights(model), expected_weights)
