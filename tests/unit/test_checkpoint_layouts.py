"""A checkpoint saved in any layout loads in any other, and training goes on with the same bits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from checkpoint_cases import PLACES, Layout, assert_same, engine_of, numbers, run
from forebay.config.resolved import CheckpointSpec

# Place and unit size: blocks, one unit for each parameter, two that cut between layers.
_LAYOUTS = [
    *(Layout(place=place) for place in PLACES),
    Layout(place="host", unit_elements=1),
    Layout(place="streamed", unit_elements=1500),
    Layout(place="host", checkpoint=CheckpointSpec(beside_training=True)),
]
_IDS = ["device", "host", "streamed", "weights", "nvme", "host-1", "streamed-1500", "host-async"]
_PAIRS = list(itertools.product(range(len(_LAYOUTS)), repeat=2))
# Each layout saves once and loads once; the whole square is in the slow suite.
_QUICK = {(i, (i + 1) % len(_LAYOUTS)) for i in range(len(_LAYOUTS))}


def _pairs():
    for pair in _PAIRS:
        name = f"{_IDS[pair[0]]}-to-{_IDS[pair[1]]}"
        yield pytest.param(*pair, id=name, marks=[] if pair in _QUICK else [pytest.mark.slow])


@pytest.fixture(scope="module")
def uninterrupted():
    """Losses and every bit of a run that is never saved, by dtype."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        with engine_of(Layout(dtype=dtype)) as engine:
            found[dtype] = run(engine, 0, 9), numbers(engine)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("source", "target"), list(_pairs()))
def test_training_goes_on_with_the_same_bits(tmp_path, uninterrupted, dtype, source, target):
    losses, want = uninterrupted[dtype]
    with engine_of(replace(_LAYOUTS[source], dtype=dtype)) as engine:
        assert run(engine, 0, 5) == losses[:5]
        assert engine.save_checkpoint(tmp_path) is True
        # the engine that saved goes on as if it had not
        assert run(engine, 5, 9) == losses[5:]
        assert_same(numbers(engine), want)
    with engine_of(replace(_LAYOUTS[target], dtype=dtype), seed=5) as engine:
        run(engine, 20, 22)  # whatever it has done before is gone
        path, _ = engine.load_checkpoint(tmp_path)
        assert path == str(tmp_path / "global_step5")
        assert run(engine, 5, 9) == losses[5:]
        assert_same(numbers(engine), want)


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("second", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("place", PLACES)
def test_masters_survive_a_change_of_precision(tmp_path, first, second, place):
    """Also there and back: what 16 bits cannot hold is in the checkpoint."""
    if first is second:
        pytest.skip("the matrix of layouts has these")
    with engine_of(Layout(dtype=first, place=place)) as engine:
        run(engine, 0, 4)
        engine.save_checkpoint(tmp_path / "first")
        want = numbers(engine)
    with engine_of(Layout(dtype=second, place=place), seed=1) as engine:
        engine.load_checkpoint(tmp_path / "first")
        found = numbers(engine)
        for kind in ("master", "exp_avg", "step"):
            assert_same(found, want, only=kind)
        for record in engine.core.collector.records:
            weight = record.part.weight(record.slot)
            assert torch.equal(weight, engine.module.get_parameter(record.label).data)
        engine.save_checkpoint(tmp_path / "second")
    with engine_of(Layout(dtype=first, place=place), seed=2) as engine:
        engine.load_checkpoint(tmp_path / "second")
        found = numbers(engine)
        for kind in ("master", "exp_avg", "step", "lr", "counters"):
            assert_same(found, want, only=kind)
        for name, value in found.items():
            if name.startswith("weight") and not name.startswith(("weight norm.", "weight fixed.")):
                assert torch.equal(value, want[name]), name


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("beside", [False, True])
def test_a_save_in_the_middle_of_a_window_has_no_effect(tmp_path, place, beside):
    """Saved after micro-step 2 of 4: the window goes on; resuming begins at the last update."""
    layout = Layout(place=place, accumulation=4, checkpoint=CheckpointSpec(beside_training=beside))
    with engine_of(layout) as engine:
        losses = run(engine, 0, 16)
        want = numbers(engine)
    with engine_of(layout) as engine:
        found = run(engine, 0, 8)
        at_update = numbers(engine)
        found += run(engine, 8, 10)
        engine.save_checkpoint(tmp_path)
        assert engine.micro_steps == 10
        found += run(engine, 10, 16)
        assert found == losses
        assert_same(numbers(engine), want)
    with engine_of(layout, seed=3) as engine:
        run(engine, 0, 2)
        engine.load_checkpoint(tmp_path)
        found = numbers(engine)
        assert found["counters"] == at_update["counters"] == (2, 8, 8)
        for kind in ("master", "exp_avg", "step", "lr"):
            assert_same(found, at_update, only=kind)
