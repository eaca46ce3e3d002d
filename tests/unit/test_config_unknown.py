"""What a user reads who mistypes, misplaces or doubles a key."""

from __future__ import annotations

from typing import Any

import pytest

from config_cases import nested, refusal
from forebay.config.schema import check
from forebay.errors import ConfigError


def _error(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("zero_optimization.stge", "did you mean zero_optimization.stage?"),
        ("gradient_cliping", "did you mean gradient_clipping?"),
        ("aio.queue_dept", "did you mean aio.queue_depth?"),
        ("f16", "did you mean bf16 or fp16?"),
        (
            "forebay.warmup_steps",
            "did you mean forebay.warm_up_steps or scheduler.params.warmup_num_steps?",
        ),
        (
            "zero_optimization.offload_optimizer.pipeline",
            "did you mean zero_optimization.offload_optimizer.pipeline_read or "
            "zero_optimization.offload_optimizer.pipeline_write?",
        ),
        ("optimizer.params.l", "did you mean optimizer.params.lr?"),
        # another name for clipping, where this level has no key of the same letters
        ("max_gRad_norm", "did you mean gradient_clipping?"),
        ("optimizer.params.max_gRad_norm", "did you mean optimizer.params.max_grad_norm?"),
        ("Gradient-Clipping", "did you mean gradient_clipping?"),
        ("stage", "did you mean zero_optimization.stage?"),
        ("zero_optimization.gradient_clipping", "did you mean gradient_clipping?"),
        ("offload_optimzer", "did you mean zero_optimization.offload_optimizer?"),
        ("zero_optimization.max_live_parametrs", "did you mean zero_optimization.max_live"),
        ("lr", "did you mean optimizer.params.lr?"),
        ("forebay.host_bugdet", "did you mean forebay.host_budget?"),
        ("optimizer.params.learning_rate", "did you mean optimizer.params.lr?"),
        ("learning_rate", "did you mean optimizer.params.lr?"),
        ("scheduler.params.warmup_steps", "did you mean scheduler.params.warmup_num_steps?"),
        ("optimizer.warmup_steps", "did you mean scheduler.params.warmup_num_steps?"),
        ("max_grad_norm", "did you mean gradient_clipping?"),
        # words of a longer key, and a path with underscores
        ("train_micro_batch_size", "did you mean train_micro_batch_size_per_gpu?"),
        ("micro_batch_size", "did you mean train_micro_batch_size_per_gpu?"),
        ("fp16_enabled", "did you mean fp16.enabled?"),
        ("zero_optimization_stage", "did you mean zero_optimization.stage?"),
        ("zero_stage", "did you mean zero_optimization.stage?"),
        ("zero_optimization.zero_stage", "did you mean zero_optimization.stage?"),
        ("zzzzzzzzzzzzzzzz", "the keys of the top level are train_batch_size, "),
        ("timers.xyzw", "the keys of timers are throughput"),
    ],
)
def test_hint(path: str, hint: str) -> None:
    assert _error(nested(path, 1)).startswith(f"config key {path} is not known\nhint: {hint}")


def test_every_unknown_key_is_named_at_once() -> None:
    error = _error({"zero_optimization": {"stge": 2}, "gradient_cliping": 1})
    assert error == (
        "config key zero_optimization.stge is not known\n"
        "hint: did you mean zero_optimization.stage?\n"
        "config key gradient_cliping is not known\n"
        "hint: did you mean gradient_clipping?"
    )


@pytest.mark.parametrize("value", [5, "x", [1], True, "auto"])
def test_a_section_is_an_object(value: object) -> None:
    assert "config key fp16 must be an object, not " in _error({"fp16": value})


def test_zero_optimization_may_be_a_boolean() -> None:
    assert check({"zero_optimization": True}).given == {"zero_optimization.stage": 1}
    assert check({"zero_optimization": False}).given == {"zero_optimization.stage": 0}
    assert "must be an object" in _error({"zero_optimization": 1})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("bfloat16.enabled", "bf16.enabled"),
        ("aio.thread_count", "aio.intra_op_parallelism"),
        ("zero_optimization.prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"),
        ("zero_optimization.max_live_parameters", "zero_optimization.stage3_max_live_parameters"),
        ("zero_optimization.max_reuse_distance", "zero_optimization.stage3_max_reuse_distance"),
        (
            "zero_optimization.param_persistence_threshold",
            "zero_optimization.stage3_param_persistence_threshold",
        ),
        (
            "zero_optimization.gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        ),
        (
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        ),
    ],
)
def test_other_names(old: str, new: str) -> None:
    value: object = True if "enabled" in old or "gather" in old else 7
    assert check(nested(old, value)).given == {new: value}
    section = old.split(".", maxsplit=1)[0]
    if section == new.split(".", maxsplit=1)[0]:
        both = nested(old, value)
        both[section] |= nested(new, value)[section]
        assert "mean the same" in _error(both)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("aio.thread_count", 0),
        ("bfloat16.enabled", "yes"),
        ("bfloat16.bf16_optimizer_states", True),
        ("zero_optimization.max_live_parameters", -1),
        ("zero_optimization.stage3_gather_fp16_weights_on_model_save", 3),
    ],
)
def test_an_error_calls_a_key_what_the_configuration_calls_it(path: str, value: object) -> None:
    assert str(refusal(nested(path, value))).startswith(f"config key {path} ")


def test_an_error_of_a_section_calls_it_so_too() -> None:
    assert str(refusal({"bfloat16": 1})).startswith("config key bfloat16 must be an object")
    both = {"bfloat16": {"enabled": True}, "fp16": {"enabled": True}}
    assert "config keys bfloat16.enabled and fp16.enabled are both true" in str(refusal(both))
    twice = {"bfloat16": {"enabled": True}, "bf16": {}}
    assert str(refusal(twice)).startswith("config keys bfloat16 and bf16 mean the same")


@pytest.mark.parametrize(
    ("path", "value", "hint"),
    [
        ("gradient_clipping", "1e-1", "write 0.1, without quotes"),
        ("zero_optimization.stage", "2", "write 2, without quotes"),
        ("zero_optimization.reduce_bucket_size", "5e8", "write 500000000.0, without quotes"),
        ("bf16.enabled", "True", "write true, without quotes"),
        ("steps_per_print", "null", "write null, without quotes"),
        ("bf16.enabled", "yes", None),
        ("zero_optimization.stage", "4", None),
        ("zero_optimization.stage", "[" * 5000, None),
    ],
)
def test_text_of_a_value_is_no_value(path: str, value: str, hint: str | None) -> None:
    error = refusal(nested(path, value))
    assert f"config key {path} must be " in str(error)
    assert error.hint == hint


def test_two_names_of_one_section() -> None:
    error = _error({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}})
    assert error == "config keys bf16 and bfloat16 mean the same\nhint: delete one of the two"


def test_null_is_nothing() -> None:
    config = {"zero_optimization": {"zenflow": None, "offload_param": None}, "optimizer": None}
    assert check({**config, "train_batch_size": None}).given == {}
    assert "must be true or false, not null" in _error({"fp16": {"enabled": None}})


def test_keys_of_another_schedule() -> None:
    params = {"warmup_num_steps": 10, "cycle_min_lr": 1e-5}
    error = _error({"scheduler": {"type": "WarmupLR", "params": params}})
    assert error == (
        "config key scheduler.params.cycle_min_lr is not known for WarmupLR\n"
        "hint: it belongs to OneCycle"
    )


@pytest.mark.parametrize(
    ("section", "name", "message"),
    [
        ("optimizer", "Lion", 'config key optimizer.type = "Lion" is not supported yet\nhint: '
         "write one of Adam, AdamW"),
        ("optimizer", "lamb", 'config key optimizer.type = "lamb" is not supported yet'),
        ("optimizer", "Adma", 'config key optimizer.type = "Adma" is not known\nhint: did you '
         "mean Adam? write one of Adam, AdamW"),
        ("optimizer", "FancyOpt", "hint: write one of Adam, AdamW"),
        ("scheduler", "CosineAnnealingLR", 'config key scheduler.type = "CosineAnnealingLR" is '
         "not supported yet"),
        ("scheduler", "warmuplr", "did you mean WarmupLR? write one of WarmupLR, WarmupDecayLR, "),
    ],
)  # fmt: skip
def test_types(section: str, name: str, message: str) -> None:
    """The type's error comes before any about parameters that only it knows."""
    assert message in str(refusal({section: {"type": name, "params": {"whatever": 1}}}))


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_missing_type(section: str) -> None:
    assert f"config key {section}.type is missing" in str(refusal({section: {"params": {}}}))
