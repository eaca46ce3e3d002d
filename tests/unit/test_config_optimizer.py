"""Optimizer and schedule: names, defaults, "auto", and whose rate governs."""

from __future__ import annotations

from typing import Any

import pytest

from config_cases import refusal, resolved
from forebay.config import OptimizerSpec, Source


def _optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def _scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


def _note(path: str, *configs: dict[str, Any], **facts: Any) -> str:
    return next(row.note for row in resolved(*configs, **facts).rows if row.path == path)


def test_defaults() -> None:
    assert resolved(_optimizer("AdamW")).optimizer == OptimizerSpec(
        name="AdamW", lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    assert resolved({"optimizer": {"type": "adam"}}).optimizer == OptimizerSpec(
        name="Adam", is_decay_mode_chosen=False
    )
    assert resolved({}).optimizer is None


@pytest.mark.parametrize("name", ["Adam", "adam", "ADAM"])
def test_adam_with_decay_has_two_meanings(name: str) -> None:
    error = refusal(_optimizer(name, weight_decay=0.1))
    assert "weight_decay 0.1 has two meanings" in error.message
    assert error.hint == (
        'write "type": "AdamW" for decoupled decay, or "adam_w_mode": false for L2'
    )
    decoupled = resolved(_optimizer(name, weight_decay=0.1, adam_w_mode=True)).optimizer
    assert decoupled == OptimizerSpec(name="AdamW", weight_decay=0.1)
    l2 = resolved(_optimizer(name, weight_decay=0.1, adam_w_mode=False)).optimizer
    assert l2 == OptimizerSpec(name="Adam", weight_decay=0.1)


def test_adam_with_decay_from_the_caller() -> None:
    raw = _optimizer("Adam", weight_decay="auto")
    assert "two meanings" in str(refusal(raw, weight_decay=0.1))
    assert resolved(raw, weight_decay=0.0).optimizer == OptimizerSpec(
        name="Adam", is_decay_mode_chosen=False
    )


def test_adamw_is_decoupled() -> None:
    assert "adam_w_mode is false, and optimizer.type is AdamW" in str(
        refusal(_optimizer("AdamW", adam_w_mode=False))
    )
    assert resolved(_optimizer("AdamW", adam_w_mode=True)).optimizer == OptimizerSpec()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_grad_norm": 1.0}, "optimizer.params.max_grad_norm = 1.0 is refused: clipping is "
         'set at the top level, once\nhint: write "gradient_clipping" at the top level'),
        ({"amsgrad": True}, "optimizer.params.amsgrad = true is not supported yet\nhint: write "
         "false, or delete optimizer.params.amsgrad"),
        ({"bias_correction": False}, "bias_correction = false is not supported yet"),
        ({"fp32_optimizer_states": False}, "is not supported yet"),
    ],
)  # fmt: skip
def test_refused_arguments(params: dict[str, Any], message: str) -> None:
    assert message in str(refusal(_optimizer("AdamW", **params)))


@pytest.mark.parametrize("key", ["lr", "betas", "eps", "weight_decay"])
def test_auto_needs_somebody(key: str) -> None:
    error = refusal(_optimizer("AdamW", **{key: "auto"}))
    assert f'config key optimizer.params.{key} is "auto"' in error.message
    assert "forebay train" in str(error.hint)


def test_auto_from_the_caller() -> None:
    raw = _optimizer("AdamW", lr="auto", betas="auto", eps="auto", weight_decay="auto")
    facts: dict[str, Any] = {
        "learning_rate": 2e-5,
        "betas": (0.8, 0.95),
        "eps": 1e-6,
        "weight_decay": 0.1,
    }
    assert resolved(raw, **facts).optimizer == OptimizerSpec(
        lr=2e-5, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1
    )
    assert resolved({}, **facts).optimizer == OptimizerSpec(
        lr=2e-5, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1
    )


def test_the_programs_own_objects_take_the_place() -> None:
    raw = _optimizer("AdamW", lr="auto") | _scheduler("WarmupDecayLR", total_num_steps="auto")
    result = resolved(raw, client_optimizer="AdamW", client_scheduler="LambdaLR")
    assert result.optimizer is None
    assert result.scheduler is None
    notes = {row.path: row.note for row in result.rows}
    assert "the AdamW that the program built takes its place" in notes["optimizer.params.lr"]
    assert "the LambdaLR that the program built" in notes["scheduler.params.total_num_steps"]


def test_a_schedule_brings_no_hidden_rate() -> None:
    raw = _optimizer("AdamW", lr=1e-5)
    for kind, key in (
        ("WarmupLR", "warmup_max_lr"),
        ("LRRangeTest", "lr_range_test_min_lr"),
    ):
        result = resolved(raw, _scheduler(kind))
        assert result.scheduler is not None
        assert dict(result.scheduler.params)[key] is None
        row = next(row for row in result.rows if row.path == f"scheduler.params.{key}")
        assert row.value == "each parameter group's own lr"


def test_a_schedule_with_rates_says_so() -> None:
    path = "optimizer.params.lr"
    raw = _optimizer("AdamW", lr=1e-5)
    assert "instead" in _note(path, raw, _scheduler("WarmupLR", warmup_max_lr=1e-4))
    assert not _note(path, raw, _scheduler("WarmupLR"))
    assert not _note(path, raw, _scheduler("WarmupCosineLR", total_num_steps=2000))
    cycle = _scheduler("OneCycle", cycle_min_lr=1e-5, cycle_max_lr=1e-4)
    assert "instead" in _note(path, raw, cycle)


def test_schedule_defaults_are_deepspeeds() -> None:
    result = resolved(_scheduler("WarmupDecayLR", total_num_steps=5000))
    assert result.scheduler is not None
    assert dict(result.scheduler.params) == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": None,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
        "total_num_steps": 5000,
    }


def test_schedule_from_the_caller() -> None:
    raw = _scheduler(
        "WarmupDecayLR",
        total_num_steps="auto",
        warmup_num_steps="auto",
        warmup_max_lr="auto",
        warmup_min_lr="auto",
    )
    result = resolved(raw, total_steps=100, warmup_steps=0)
    assert result.scheduler is not None
    assert dict(result.scheduler.params)["total_num_steps"] == 100
    assert dict(result.scheduler.params)["warmup_num_steps"] == 0
    sources = {row.path: row.source for row in result.rows}
    assert sources["scheduler.params.total_num_steps"] is Source.AUTO
    assert 'total_num_steps is "auto"' in str(refusal(raw, warmup_steps=0))


def test_a_run_may_be_shorter_than_its_schedule() -> None:
    raw = _scheduler("WarmupDecayLR", total_num_steps=5000)
    result = resolved(raw, total_steps=10)
    assert result.scheduler is not None
    assert dict(result.scheduler.params)["total_num_steps"] == 5000


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps is missing: WarmupDecayLR needs"),
        ("OneCycle", {"cycle_max_lr": 1}, "scheduler.params.cycle_min_lr is missing"),
        ("OneCycle", {"cycle_min_lr": 1}, "scheduler.params.cycle_max_lr is missing"),
        ("WarmupCosineLR", {"total_num_steps": 10}, "total_num_steps is 10, and "
         "warmup_num_steps is 1000"),
        ("WarmupLR", {"warmup_type": "cubic"}, 'must be "log" or "linear", not "cubic"'),
        ("WarmupLR", {"warmup_max_lr": []}, "must be a number >= 0, or one for each"),
        ("WarmupLR", {"last_batch_iteration": 5}, "is refused: a schedule starts at step 0"),
    ],
)  # fmt: skip
def test_schedules_that_cannot_run(kind: str, params: dict[str, Any], message: str) -> None:
    assert message in str(refusal(_scheduler(kind, **params)))
