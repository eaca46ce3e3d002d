"""Checkpoints of ZenFlow: any step goes on with the same bits; every mode loads every other's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from compat_cases import bits_of, engine_of, same_bits, small, train
from config_cases import ZENFLOW, merged
from forebay.checkpoint.manifest import Role
from forebay.checkpoint.reader import Checkpoint
from forebay.optim.reference import round_to

EXACT = {"bf16": {"enabled": True}}
HOST = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def _zenflow(**changes):
    return merged(EXACT, {"zero_optimization": {**HOST, "zenflow": {**ZENFLOW, **changes}}})


KINDS = {
    "exact": EXACT,
    "delayed": merged(EXACT, {"forebay": {"update": "delayed"}}),
    "device": merged(EXACT, {"zero_optimization": {"offload_optimizer": {"device": "none"}}}),
}


# In warm-up, in the middle of intervals, with an update in flight, before and after a choice.
@pytest.mark.parametrize("steps", [1, 3, 4, 6, 7, 8, 11])
@pytest.mark.parametrize("overlap", [True, False])
def test_going_on_from_a_checkpoint(tmp_path, steps, overlap):
    """Saving changes nothing, and what is loaded goes on with the same bits."""
    config = _zenflow(overlap_step=overlap)
    plain = engine_of(config)
    train(plain, steps)
    first = engine_of(config)
    train(first, steps)
    assert first.save_checkpoint(tmp_path, tag="middle")
    held = [p.clone() for p in first.module.parameters()]
    more = train(first, 14, seed=5)
    assert more == train(plain, 14, seed=5)
    other = engine_of(config)
    other.load_checkpoint(tmp_path, tag="middle")
    assert same_bits(held, list(other.module.parameters()))
    assert train(other, 14, seed=5) == more
    assert same_bits(bits_of(first), bits_of(other))
    for engine in (plain, first, other):
        engine.close()


@pytest.mark.parametrize("changes", [{"offload": True}, {"update_interval": "auto"}], ids=str)
def test_the_other_settings(tmp_path, changes):
    config = _zenflow(**changes)
    first = engine_of(config)
    train(first, 9)
    first.save_checkpoint(tmp_path)
    other = engine_of(config)
    other.load_checkpoint(tmp_path)
    assert train(other, 9, seed=5) == train(first, 9, seed=5)
    assert same_bits(bits_of(first), bits_of(other))
    first.close()
    other.close()


def test_what_it_holds(tmp_path):
    """Moments of important columns are in place; gathered sums mark the columns."""
    engine = engine_of(_zenflow(overlap_step=False, full_warm_up_rounds=0))
    train(engine, 2)
    engine.save_checkpoint(tmp_path, tag="middle")
    with Checkpoint(tmp_path / "middle") as checkpoint:
        manifest = checkpoint.manifest
        assert manifest.policy["step"] == 2
        for entry in manifest.parameters:
            if Role.EXP_AVG not in entry.slices:
                continue
            assert (Role.GATHERED in entry.slices) == (len(entry.shape) > 1)
            if len(entry.shape) < 2:
                continue
            read = [checkpoint.read(entry, role, 0, entry.elements) for role in entry.slices]
            found = dict(zip(entry.slices, read, strict=True))
            important = found[Role.GATHERED].isnan().view(entry.shape[0], -1)
            assert important.all(0).sum() == important.any(0).sum() == int(0.3 * entry.shape[1])
            moved = found[Role.EXP_AVG].ne(0).view_as(important)
            assert moved[important].float().mean() > 0.9  # the rest was never updated
            assert not moved[~important].any()
            assert manifest.policy["gathered"][entry.names[0]] == 2
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_loading_into_other_modes_and_back(tmp_path, kind):
    first = engine_of(_zenflow())
    train(first, 9)
    first.save_checkpoint(tmp_path, tag="zenflow")
    other = engine_of(KINDS[kind])
    other.load_checkpoint(tmp_path, tag="zenflow")
    first.synchronize()  # brings what was held into force
    assert same_bits(bits_of(first), bits_of(other))
    train(other, 3)
    other.save_checkpoint(tmp_path, tag="other")
    again = engine_of(_zenflow())
    again.load_checkpoint(tmp_path, tag="other")
    assert same_bits(bits_of(again), bits_of(other))
    assert all(math.isfinite(loss) for loss in train(again, 9))
    for engine in (first, other, again):
        engine.close()


@pytest.mark.parametrize(
    ("saved", "into"),
    [("zenflow", "delayed"), ("delayed", "zenflow"), ("zenflow", "warms up")],
)
def test_another_mode_trains_with_the_masters_from_its_first_step(tmp_path, saved, into):
    """What zenflow or delayed holds back for itself is no weight of the other's."""
    kinds = {
        "zenflow": _zenflow(),
        "delayed": merged(EXACT, {"forebay": {"update": "delayed", "warm_up_steps": 2}}),
        "warms up": _zenflow(full_warm_up_rounds=20),
    }
    first, other, exact = (engine_of(kinds.get(kind, EXACT)) for kind in (saved, into, "exact"))
    train(first, 8)
    first.save_checkpoint(tmp_path)
    for engine in (other, exact):
        engine.load_checkpoint(tmp_path)
    steps = 9 if into == "warms up" else 1
    assert train(other, steps, seed=5) == train(exact, steps, seed=5)
    if into == "warms up":
        assert same_bits(bits_of(other), bits_of(exact))
    for engine in (first, other, exact):
        engine.close()


class _Branch(nn.Module):
    """A branch that not every step takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.branch = nn.Linear(7, 7), nn.Linear(7, 7)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        x = self.always(x)
        return self.branch(x) if self.steps not in (8, 9) else x


def test_a_choice_that_waits_for_a_gradient_is_made_after_loading(tmp_path):
    """Columns are due in step 8, where the branch has no gradient, and it is saved then."""
    first = engine_of(_zenflow(), model=_Branch())
    train(first, 8)
    first.save_checkpoint(tmp_path)
    other = engine_of(_zenflow(), model=_Branch())
    other.load_checkpoint(tmp_path)
    other.module.steps = 8
    assert train(other, 9, seed=5) == train(first, 9, seed=5)
    assert same_bits(bits_of(first), bits_of(other))
    first.close()
    other.close()


def test_what_a_checkpoint_lacks_keeps_its_newest_weights(tmp_path):
    """An update of the rest is on its way for the last layer, which the checkpoint has not."""
    first = engine_of(_zenflow())
    train(first, 4)
    first.save_checkpoint(tmp_path)
    torch.manual_seed(1)
    longer = nn.Sequential(*small(), nn.Linear(3, 5), nn.Linear(5, 3)).to(torch.bfloat16)
    other = engine_of(_zenflow(), model=longer)
    train(other, 6)
    other.load_checkpoint(tmp_path, load_module_strict=False)
    other.synchronize()
    for record in other.core.collector.records:
        master = record.part.master_copy(record.slot)
        assert torch.equal(round_to(master, torch.bfloat16), record.param)
    first.close()
    other.close()


def test_weights_alone(tmp_path):
    """What ran for the old ones does not come back."""
    first = engine_of(_zenflow())
    train(first, 8)
    first.save_checkpoint(tmp_path)
    other = engine_of(_zenflow())
    train(other, 8, seed=3)
    other.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
    first.synchronize()
    other.synchronize()
    assert same_bits(list(first.module.parameters()), list(other.module.parameters()))
    train(other, 5)
    with torch.no_grad():
        for record in other.core.collector.records:
            other.synchronize()
            master = record.part.master_copy(record.slot)
            assert torch.equal(round_to(master, torch.bfloat16), record.param)
    first.close()
    other.close()
