"""`forebay.update` and `super_offload`: what they come to, and what contradicts them."""

from __future__ import annotations

import logging

import pytest

from compat_cases import engine_of, train
from config_cases import merged
from forebay.config.resolve import resolve
from forebay.errors import ConfigError
from forebay.plan.policies import EXACT, Delayed, DuringBackward, Speculative
from forebay.tiers.ledger import Role, Tier

CPU = {
    "train_batch_size": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}
STAGE_3 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
SUPER = {"zero_optimization": {"offload_optimizer": {"super_offload": True}}}


def _update(kind, **more):
    return {"forebay": {"update": kind, **more}}


def _place(**keys):
    return {"zero_optimization": {"offload_optimizer": keys}}


def test_super_offload_is_speculative():
    config = resolve(merged(CPU, SUPER))
    assert config.update.kind == "speculative"
    row = next(row for row in config.describe() if row.path == "forebay.update")
    assert row.value == "speculative"
    assert "super_offload" in row.note


@pytest.mark.parametrize("kind", ["exact", "speculative", "delayed"])
def test_resolving_what_was_resolved(kind):
    config = resolve(merged(CPU, _update(kind, warm_up_steps=7)))
    assert config.update.kind == kind
    again = resolve(config.as_dict())
    assert again.update.kind == kind
    assert (again.update.warm_up_steps == 7) == (kind == "delayed")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (_update("eager"), 'forebay.update.*"exact", "speculative", "delayed" or "zenflow"'),
        (merged(SUPER, _update("delayed")), 'super_offload, which asks for "speculative"'),
        (merged(SUPER, {"zero_optimization": {"stage": 2}}), "needs stage 3 and device cpu"),
        (
            merged(
                _update("speculative"),
                _place(device="none"),
            ),
            "needs zero_optimization.offload_optimizer.device cpu.*no update on the host",
        ),
        (
            merged(
                _update("speculative"),
                {
                    "zero_optimization": {
                        "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}
                    }
                },
            ),
            "written to the drive in vain",
        ),
        (
            merged(_update("delayed"), {"zero_optimization": {"offload_param": {"device": "cpu"}}}),
            "offload_param.device.*contradicts",
        ),
        (
            _update("delayed", streamed_units=[0]),
            r"streamed_units = \[0\] contradicts",
        ),
        (merged(_update("delayed"), _place(device="none")), "device cpu or nvme, and it is .none"),
        (merged(_update("delayed"), _place(ratio=0)), "ratio = 0 contradicts.*no update on the"),
        (_update("delayed", synchronous=True), "forebay.synchronous = true contradicts"),
    ],
)
def test_what_contradicts_a_mode_is_named(changes, match):
    with pytest.raises(ConfigError, match=match):
        resolve(merged(CPU, changes))


def test_shares_that_the_planner_knows_may_be_auto():
    shares = {"ratio": "auto", "cpuadam_cores_perc": "auto"}
    config = resolve(merged(CPU, {"zero_optimization": {"offload_optimizer": shares}}))
    assert config.zero == resolve(CPU).zero


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, EXACT),
        (SUPER, Speculative()),
        (_update("delayed", warm_up_steps=3), Delayed(warm_up_steps=3)),
        (merged(_update("delayed"), _place(ratio=0.5)), Delayed(warm_up_steps=40)),
        (
            merged(SUPER, {"gradient_clipping": 0.0, "bf16": {"check_grad_overflow": False}}),
            DuringBackward(),
        ),
    ],
)
def test_the_policy_that_acts(changes, expected):
    engine = engine_of(merged(STAGE_3, changes))
    assert engine.core.placement.policy == expected
    train(engine, 6)
    engine.close()


def test_a_second_state_that_does_not_fit_is_left_out(caplog):
    """What the budget holds is known before anything is placed."""
    plain = engine_of(STAGE_3)
    host = plain.ledger.bytes(Tier.HOST)
    state = plain.ledger.bytes(Tier.HOST, Role.OPTIM_STATES)
    plain.close()
    roomy = engine_of(merged(STAGE_3, SUPER))
    assert roomy.ledger.bytes(Tier.HOST, Role.OPTIM_STATES) == 2 * state
    roomy.close()
    with caplog.at_level(logging.WARNING, logger="forebay"):
        # beside it, what a save takes at least
        tight = {"forebay": {"host_budget": host + state + (1 << 20)}}
        engine = engine_of(merged(merged(STAGE_3, SUPER), tight))
    assert engine.core.placement.policy == EXACT
    assert "a second state of" in caplog.text
    assert "does not fit" in caplog.text
    row = next(row for row in engine.config.describe() if row.path == "forebay.update")
    assert row.value == "exact"
    assert "super_offload; updates are exact" in row.note
    train(engine, 2)
    engine.close()


def test_where_nothing_updates_on_the_host(caplog):
    with caplog.at_level(logging.WARNING, logger="forebay"):
        engine = engine_of(
            merged(
                merged(STAGE_3, SUPER), {"zero_optimization": {"offload_param": {"device": "cpu"}}}
            )
        )
    assert engine.core.placement.policy == EXACT
    assert "no update to hide" in caplog.text
    engine.close()
