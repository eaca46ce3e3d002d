"""Working dtype, loss scale and finiteness check."""

from __future__ import annotations

from typing import Any

import pytest

from config_cases import nested, refusal, resolved
from forebay.config import LossScaleSpec, PrecisionSpec

_BF16 = {"bf16": {"enabled": True}}
_FP16 = {"fp16": {"enabled": True}}
_AUTO = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}


@pytest.mark.parametrize(
    ("config", "model", "dtype"),
    [
        ({}, None, "float32"),
        ({}, "float32", "float32"),
        ({}, "bfloat16", "bfloat16"),
        ({}, "float16", "float16"),
        (_BF16, None, "bfloat16"),
        (_BF16, "float32", "bfloat16"),
        (_BF16, "float16", "bfloat16"),
        (_FP16, "bfloat16", "float16"),
        (_AUTO, "bfloat16", "bfloat16"),
        (_AUTO, "float16", "float16"),
        (_AUTO, "float32", "float32"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}}, None, "bfloat16"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": "auto"}}, None, "float16"),
        ({"bf16": {"enabled": False}}, "float32", "float32"),
        ({"bf16": {"enabled": False}}, "float16", "float16"),
        ({"bfloat16": {"enabled": True}}, None, "bfloat16"),
    ],
)
def test_dtype(config: dict[str, Any], model: str | None, dtype: str) -> None:
    assert resolved(config, model_dtype=model).precision.dtype == dtype


def test_both_at_once() -> None:
    error = refusal(_BF16, _FP16)
    assert str(error) == (
        "config keys bf16.enabled and fp16.enabled are both true\nhint: turn one of them off"
    )


def test_auto_without_a_model() -> None:
    error = refusal(_AUTO)
    assert error.message == (
        'config key bf16.enabled is "auto", and the caller does not know its value'
    )
    assert "model's dtype" in str(error.hint)


def test_switched_off_against_the_model() -> None:
    error = refusal({"bf16": {"enabled": False}}, model_dtype="bfloat16")
    assert "bf16.enabled is false, and the model is bfloat16" in str(error)


def test_unknown_model_dtype() -> None:
    assert "it must be float32, bfloat16 or float16" in str(refusal({}, model_dtype="int8"))


def test_check_grad_overflow() -> None:
    off = nested("bf16.check_grad_overflow", value=False)
    assert resolved(_BF16).precision == PrecisionSpec(dtype="bfloat16")
    assert not resolved(_BF16, off).precision.check_grad_overflow
    on = nested("bf16.check_grad_overflow", value=True)
    for config, dtype in (({}, "float32"), (_FP16, "float16")):
        row = next(r for r in resolved(config, on).rows if r.path == "bf16.check_grad_overflow")
        assert row.note == f"changes nothing: {dtype} gradients are always checked"
        refused = refusal(config, off)
        assert f"is false, and weights are {dtype}" in str(refused)
        assert refused.hint.endswith("in place of fp16") is (config is _FP16)


def test_loss_scale() -> None:
    assert resolved(_FP16).precision.loss_scale == LossScaleSpec()
    assert resolved(_BF16).precision.loss_scale is None
    settings = {
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 500,
        "hysteresis": 3,
        "consecutive_hysteresis": True,
        "min_loss_scale": 0.25,
    }
    assert resolved(_FP16, {"fp16": settings}).precision.loss_scale == LossScaleSpec(
        initial_scale_power=12,
        window=500,
        hysteresis=3,
        consecutive_hysteresis=True,
        min_scale=0.25,
    )
    static = resolved(_FP16, {"fp16": {"loss_scale": 128}}).precision.loss_scale
    assert static is not None
    assert static.static == 128.0


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"loss_scale": 1000}, "fp16.loss_scale is 1000; a loss scale is a power", "write 1024"),
        ({"loss_scale": 2.0**101}, "fp16.loss_scale is 2.5353e+30", "write 1.26765e+30"),
        ({"loss_scale": 1e308}, "a loss scale is a power of two", "write 1.26765e+30"),
        ({"min_loss_scale": 3}, "fp16.min_loss_scale is 3", "write 4"),
        ({"initial_scale_power": 101}, "the first scale must lie between", "write 16"),
        ({"initial_scale_power": 2**40}, "the first scale must lie between", "write 16"),
        ({"initial_scale_power": 1, "min_loss_scale": 4}, "min_loss_scale 4 and", "write 16"),
    ],
)
def test_loss_scales_that_would_change_bits(
    settings: dict[str, Any], message: str, hint: str
) -> None:
    error = refusal(_FP16, {"fp16": settings})
    assert message in error.message
    assert error.hint == hint
    # Without float16 nothing reads them, and the row says so.
    assert resolved(_BF16, {"fp16": settings}).precision.loss_scale is None


@pytest.mark.parametrize("value", [None, "auto", "fp32", "float32"])
def test_gradients_add_up_in_fp32(value: str | None) -> None:
    config = {"data_types": {"grad_accum_dtype": value}, "gradient_accumulation_steps": 4}
    row = next(
        row for row in resolved(_BF16, config).rows if row.path == "data_types.grad_accum_dtype"
    )
    assert row.value in ("fp32", "float32")


def test_accumulation_in_another_dtype() -> None:
    config = nested("data_types.grad_accum_dtype", "bf16")
    assert "keeps its own dtype" in resolved(_BF16, config).table()
    message = str(refusal(_BF16, config, {"gradient_accumulation_steps": 4}))
    assert 'data_types.grad_accum_dtype = "bf16" is not supported yet' in message
    assert "gradient_accumulation_steps 4 and bfloat16 weights" in message
    assert "not supported yet" in str(refusal(_FP16, config))


def test_param_dtype_must_agree() -> None:
    config = nested("data_types.param_dtype", "bf16")
    assert resolved(_BF16, config).precision.dtype == "bfloat16"
    assert "delete data_types.param_dtype" in str(refusal(_FP16, config))
