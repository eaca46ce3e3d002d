"""Checkpoints and readers while a step's new weights are held back."""

from __future__ import annotations

import tempfile

import pytest
import torch

from compat_cases import bits_of, engine_of, same_bits, train
from config_cases import merged
from forebay.checkpoint.manifest import Role
from forebay.checkpoint.reader import Checkpoint
from forebay.optim.reference import round_to

EXACT = {"bf16": {"enabled": True}}
DELAYED = merged(EXACT, {"forebay": {"update": "delayed", "warm_up_steps": 2}})
HALF = {"sub_group_size": 1, "offload_optimizer": {"ratio": 0.5}}
FILES = {"device": "nvme", "nvme_path": tempfile.gettempdir(), "buffer_count": 2}
KINDS = {
    "half": merged(DELAYED, {"zero_optimization": HALF}),
    "files": merged(DELAYED, {"zero_optimization": {"offload_optimizer": FILES}}),
    "exact": EXACT,
    "delayed": DELAYED,
    "device": merged(EXACT, {"zero_optimization": {"offload_optimizer": {"device": "none"}}}),
    "speculative": merged(EXACT, {"forebay": {"update": "speculative"}}),
    "fp32": merged(EXACT, {"bf16": {"enabled": False}}),
}


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("kind", ["delayed", "half", "files"])
def test_going_on_from_a_checkpoint(tmp_path, fp16, kind):
    """Saving changes nothing, and what is loaded goes on with the same bits."""
    config = KINDS[kind]
    if fp16:
        config = merged(config, {"bf16": {"enabled": False}, "fp16": {"enabled": True}})
    plain = engine_of(config)
    train(plain, 30)
    first = engine_of(config)
    train(first, 12)
    assert first.save_checkpoint(tmp_path, tag="middle")
    held = [p.clone() for p in first.module.parameters()]
    more = train(first, 18, seed=5)
    other = engine_of(config)
    other.load_checkpoint(tmp_path, tag="middle")
    assert same_bits(held, list(other.module.parameters()))
    assert train(other, 18, seed=5) == more
    assert same_bits(bits_of(first), bits_of(other))
    for engine in (plain, first, other):
        engine.close()


@pytest.mark.parametrize("saved", ["delayed", "half", "files"])
@pytest.mark.parametrize("kind", ["exact", "device", "speculative", "fp32"])
def test_loading_into_other_modes(tmp_path, kind, saved):
    """They have the newest masters, and weights that are those, rounded."""
    first = engine_of(KINDS[saved])
    train(first, 9)
    first.save_checkpoint(tmp_path)
    other = engine_of(KINDS[kind])
    other.load_checkpoint(tmp_path)
    held = [p.clone() for p in first.module.parameters()]
    assert not same_bits(held, [p.to(torch.bfloat16) for p in other.module.parameters()])
    first.synchronize()  # brings what was held into force
    left, right = bits_of(first), bits_of(other)
    assert same_bits(left, [value.to(own.dtype) for value, own in zip(right, left, strict=True)])
    train(other, 3)
    first.close()
    other.close()


@pytest.mark.parametrize("into", ["delayed", "half", "files"])
@pytest.mark.parametrize("kind", ["exact", "device", "speculative"])
def test_loading_from_other_modes(tmp_path, kind, into):
    first = engine_of(KINDS[kind])
    train(first, 9)
    first.save_checkpoint(tmp_path)
    other = engine_of(KINDS[into])
    other.load_checkpoint(tmp_path)
    assert same_bits(bits_of(first), bits_of(other))
    train(other, 3)
    first.close()
    other.close()


def test_what_a_checkpoint_has_of_it(tmp_path):
    """In the warm-up nothing is held back; later each weight is there a second time."""
    engine = engine_of(DELAYED)
    for steps, expected in ((2, set()), (3, {Role.IN_FORCE})):
        train(engine, steps)
        engine.save_checkpoint(tmp_path, tag=str(steps))
        with Checkpoint(tmp_path / str(steps)) as saved:
            for entry in saved.manifest.parameters:
                assert set(entry.slices) & {Role.IN_FORCE} == expected
    engine.close()


@pytest.mark.parametrize("kind", ["delayed", "half", "files"])
def test_a_weight_that_the_user_writes_is_in_force_and_its_master(kind):
    """What was held back for it is dropped; other weights come into force as they should."""
    engine, plain = engine_of(KINDS[kind]), engine_of(KINDS[kind])
    for one in (engine, plain):
        train(one, 6)
        one.module.state_dict()  # weights are here, and the update has run
    mine, theirs = next(iter(engine.module.parameters())), next(iter(plain.module.parameters()))
    before = mine.detach().clone()
    with torch.no_grad():
        mine.mul_(2)
    engine.synchronize()
    plain.synchronize()
    assert torch.equal(mine, before * 2)
    assert not torch.equal(theirs, before)
    rest = list(engine.module.parameters())[1:], list(plain.module.parameters())[1:]
    assert same_bits(*rest)
    engine.close()
    plain.close()


@pytest.mark.parametrize("kind", ["delayed", "half", "files"])
def test_closing_brings_the_last_update_into_force(kind):
    engine = engine_of(KINDS[kind])
    train(engine, 6)
    engine.module.state_dict()
    before = [p.clone() for p in engine.module.parameters()]
    masters = [r.part.master_copy(r.slot) for r in engine.core.collector.records]
    engine.close()
    after = list(engine.module.parameters())
    assert not same_bits(before, after)
    for weight, master in zip(after, masters, strict=True):
        assert torch.equal(weight, round_to(master, weight.dtype))
