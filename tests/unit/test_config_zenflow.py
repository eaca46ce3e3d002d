"""The section `zenflow`: what it asks for, and every way to contradict it."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from forebay.compat.policies import policy_of
from forebay.compat.sampling import RankSampler
from forebay.config.facts import Facts
from forebay.config.resolve import resolve
from forebay.config.zenflow_spec import ZenflowSpec
from forebay.errors import ConfigError
from forebay.plan.zenflow import ZenFlow

OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
_SECTION = "zero_optimization.zenflow"


def _config(section, zero=None, **more):
    merged = {**OFFLOADED, **(zero or {})}
    if section is not None:
        merged["zenflow"] = section
    return {"train_batch_size": 4, "zero_optimization": merged, **more}


def _resolved(section, facts=None, **more):
    return resolve(_config(section, **more), facts=facts)


def test_left_out_it_is_another_mode():
    config = _resolved(None)
    assert config.zero.zenflow is None
    assert policy_of(config) != ZenFlow()


def test_defaults():
    config = _resolved({})
    assert config.zero.zenflow == ZenflowSpec(select_steps=100)
    notes = {row.path: (row.value, row.note) for row in config.rows}
    assert notes["forebay.update"] == ("zenflow", f"from {_SECTION}")
    assert "nobody knows the epoch" in notes[f"{_SECTION}.select_interval"][1]
    assert _resolved(None, forebay={"update": "zenflow"}).zero.zenflow == config.zero.zenflow


def test_all_that_deepspeed_writes():
    section = {
        "topk_ratio": 0.05,
        "select_strategy": "step",
        "select_interval": 16,
        "update_interval": 4,
        "full_warm_up_rounds": 10,
        "overlap_step": True,
        "offload": True,
        "auto_ratio": 0.9,
        "pt_reserved_cores_perc": 0.25,
    }
    config = _resolved(section, gradient_accumulation_steps=2)
    assert policy_of(config) == ZenFlow(
        topk_ratio=0.05,
        select_every=16,
        update_every=4,
        auto_ratio=0.9,
        warm_up_steps=10,
        overlaps=True,
        keeps_state_on_host=True,
    )
    assert config.batch.accumulation_steps == 2
    rows = {row.path for row in config.rows}
    assert {f"{_SECTION}.{name}" for name in section} <= rows


def test_epochs_are_counted_where_the_data_is_known():
    facts = Facts(samples=41)
    assert _resolved({}, facts=facts).zero.zenflow.select_steps == 11
    section = {"select_strategy": "epoch", "select_interval": 2}
    assert _resolved(section, facts=facts).zero.zenflow.select_steps == 22
    written = {**section, "steps_per_epoch": 7}
    assert _resolved(written, facts=facts).zero.zenflow.select_steps == 14
    with pytest.raises(ConfigError, match=r"(?s)select_strategy.*epoch.*steps_per_epoch"):
        _resolved(section)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("samples", [24, 41, 47, 48])
def test_an_epoch_has_the_updates_that_its_loader_has_batches_for(ranks, drops, samples):
    """Micro-batches of 2 and two of them to an update, whatever is dropped."""
    more = {"train_batch_size": 4 * ranks, "gradient_accumulation_steps": 2}
    facts = Facts(samples=samples, world_size=ranks)
    config = _resolved(
        {"select_strategy": "epoch"}, facts=facts, dataloader_drop_last=drops, **more
    )
    data = list(range(samples))
    sampler = RankSampler(data, rank=0, size=ranks, seed=None, drop_last=drops)
    batches = len(DataLoader(data, batch_size=2, sampler=sampler, drop_last=drops))
    assert config.zero.zenflow.select_steps == -(-batches // 2)


def test_where_epochs_run_on_into_each_other_nothing_is_dropped():
    facts = Facts(samples=41, epochs_run_on=True)
    section = {"select_strategy": "epoch"}
    assert _resolved(section, facts, dataloader_drop_last=True).zero.zenflow.select_steps == 11


@pytest.mark.parametrize("ranks", [1, 2])
def test_auto_lets_the_gradients_decide(ranks):
    assert _resolved({}, facts=Facts(world_size=ranks)).zero.zenflow.update_steps is None


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"select_strategy": "epoch", "steps_per_epoch": 7, "update_interval": 5, "offload": True},
        {"topk_ratio": 0.2, "overlap_step": True, "full_warm_up_rounds": 3, "auto_ratio": 0.5},
    ],
    ids=str,
)
def test_what_is_saved_with_a_run_asks_for_the_same(section):
    config = _resolved(section, facts=Facts(samples=100))
    assert resolve(config.as_dict()) == config


STEP = {"select_strategy": "step", "select_interval": 8}
BAD = [
    ({"topk_ratio": 0}, r"topk_ratio must be a number > 0 and < 1, not 0"),
    ({"topk_ratio": 1}, r"topk_ratio must be a number > 0 and < 1, not 1"),
    ({"topk_ratio": -0.1}, r"topk_ratio must be a number > 0 and < 1"),
    ({"topk_ratio": "many"}, r"topk_ratio must be a number > 0 and < 1"),
    ({"select_strategy": "norm"}, r'select_strategy must be "auto", "step" or "epoch"'),
    ({"select_interval": "often"}, r'select_interval must be an integer >= 1 or "auto"'),
    ({"select_interval": 0}, r'select_interval must be an integer >= 1 or "auto"'),
    ({"update_interval": 0}, r'update_interval must be an integer >= 1 or "auto"'),
    ({"update_interval": 2.5}, r'update_interval must be an integer >= 1 or "auto"'),
    ({"full_warm_up_rounds": -1}, r"full_warm_up_rounds must be an integer >= 0"),
    ({"auto_ratio": 1.5}, r"auto_ratio must be a number from 0 to 1"),
    ({"overlap_step": 1}, r"overlap_step must be true or false"),
    ({"topk_ration": 0.1}, r"topk_ration is not known"),
    ({"select_interval": 5}, r"select_interval = 5 counts nothing with select_strategy .auto."),
    ({"select_strategy": "step"}, r"select_interval is .auto. with select_strategy .step."),
    ({**STEP, "update_interval": 9}, r"update_interval = 9 is above the 8 updates"),
]


@pytest.mark.parametrize(("section", "text"), BAD, ids=lambda value: str(value)[:40])
def test_bad_values(section, text):
    with pytest.raises(ConfigError, match=text) as caught:
        _resolved(section)
    assert _SECTION in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


NVME = {"offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}}
EXCLUDED = [
    ({"stage": 0}, {}, r"needs zero_optimization.stage 1, 2 or 3, and the stage is 0"),
    ({"offload_optimizer": {"device": "none"}}, {}, r"needs \S+device cpu, and it is .none."),
    ({"offload_optimizer": None}, {}, r"needs \S+device cpu, and it is .none."),
    ({"offload_optimizer": {"device": "cpu", "ratio": 0.0}}, {}, r"ratio = 0 keeps all of it"),
    (NVME, {}, r"needs \S+device cpu, and it is .nvme.: columns"),
    ({"stage": 3, "offload_param": {"device": "cpu"}}, {}, r"needs \S+offload_param.device none"),
    ({}, {"forebay": {"update": "exact"}}, r"forebay.update = .exact. contradicts"),
    ({}, {"forebay": {"update": "delayed"}}, r"forebay.update = .delayed. contradicts"),
]


@pytest.mark.parametrize(("zero", "more", "text"), EXCLUDED, ids=lambda value: str(value)[:40])
def test_what_the_stage_the_device_or_another_mode_excludes(zero, more, text):
    with pytest.raises(ConfigError, match=text) as caught:
        _resolved({}, zero=zero, **more)
    assert "hint: " in str(caught.value)
    if not more:
        with pytest.raises(ConfigError, match=text):
            _resolved(None, zero=zero, forebay={"update": "zenflow"})


def test_two_modes_at_once():
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}
    with pytest.raises(
        ConfigError, match=r"(?s)super_offload and \S+zenflow are two.*overlap_step"
    ):
        _resolved({}, zero=zero)


def test_choices_more_often_than_updates_by_epochs():
    section = {"select_strategy": "epoch", "steps_per_epoch": 3, "update_interval": 4}
    with pytest.raises(ConfigError, match=r"update_interval = 4 is above the 3 updates"):
        _resolved(section)
