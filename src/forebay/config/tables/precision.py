"""Rows of the dtypes: `fp16`, `bf16`, `amp`, `torch_autocast`, `data_types`."""

from __future__ import annotations

from typing import Final

from forebay.config.keys import Auto, Key, hint, honoured, moot, refused, section
from forebay.config.kinds import (
    ANYTHING,
    COUNT,
    FLAG,
    NON_NEGATIVE,
    POSITIVE,
    POSITIVE_NUMBER,
    TEXT,
    TEXTS,
    choice,
    optional,
)

__all__ = ["KEYS"]

_DTYPE: Final = optional(
    choice("fp32", "float32", "float", "fp16", "float16", "half", "bf16", "bfloat16")
)

_FP16: Final[tuple[Key, ...]] = (
    section("fp16", "float16 weights with a loss scale."),
    honoured(
        "fp16.enabled",
        FLAG,
        'Train in float16. "auto": where the model is float16. Without either section the '
        "model's own dtype is kept.",
        default=False,
        auto=Auto.MODEL,
    ),
    refused("fp16.auto_cast", FLAG, "Cast the inputs of the model to float16.", default=False),
    honoured(
        "fp16.loss_scale", NON_NEGATIVE, "A fixed scale, a power of two; 0 is dynamic.", default=0.0
    ),
    honoured("fp16.initial_scale_power", COUNT, "The first scale is 2 to this power.", default=16),
    honoured(
        "fp16.loss_scale_window",
        POSITIVE,
        "Updates without overflow before it doubles.",
        default=1000,
    ),
    honoured("fp16.hysteresis", POSITIVE, "Overflows before it halves.", default=2),
    honoured(
        "fp16.consecutive_hysteresis",
        FLAG,
        "Whether every update without overflow restores the hysteresis.",
        default=False,
    ),
    honoured(
        "fp16.min_loss_scale",
        POSITIVE_NUMBER,
        "A power of two. An overflow at this scale ends training.",
        default=1.0,
    ),
    refused(
        "fp16.fp16_master_weights_and_grads",
        FLAG,
        "Keep master weights and gradients in float16.",
        default=False,
    ),
)

_BF16: Final[tuple[Key, ...]] = (
    section("bf16", "bfloat16 weights.", aliases=("bfloat16",)),
    honoured(
        "bf16.enabled",
        FLAG,
        'Train in bfloat16. "auto": where the model is bfloat16.',
        default=False,
        auto=Auto.MODEL,
    ),
    honoured(
        "bf16.check_grad_overflow",
        FLAG,
        "Skip the whole update when a gradient is not finite. Only bfloat16 can turn it off; with "
        "gradient_clipping 0 units then update during backward.",
        default=True,
    ),
    hint(
        "bf16.immediate_grad_update",
        FLAG,
        "Add up each gradient as soon as it exists.",
        default=False,
        reason="every gradient is added as it comes, in fp32",
    ),
    refused(
        "bf16.bf16_master_weights_and_grads",
        FLAG,
        "Keep master weights and gradients in bfloat16.",
        default=False,
    ),
    refused("bf16.bf16_optimizer_states", FLAG, "Keep the moments in bfloat16.", default=False),
)

_OTHERS: Final[tuple[Key, ...]] = (
    section("amp", "NVIDIA apex."),
    refused(
        "amp.enabled",
        FLAG,
        "Mixed precision by apex.",
        default=False,
        reason="apex is not used",
        instead='write "bf16": {"enabled": true}',
        auto=Auto.DEFAULT,
    ),
    *moot(
        "amp",
        reason="it acts with amp.enabled only",
        rows={
            "opt_level": (TEXT, "O1", "apex's level."),
            "loss_scale": (ANYTHING, None, "apex's loss scale."),
            "min_loss_scale": (ANYTHING, None, "Its minimum."),
            "max_loss_scale": (ANYTHING, None, "Its maximum."),
            "keep_batchnorm_fp32": (ANYTHING, None, "Batch norm in fp32."),
            "master_weights": (ANYTHING, None, "Keep master weights."),
            "cast_model_type": (ANYTHING, None, "Dtype of the weights."),
            "cast_model_outputs": (ANYTHING, None, "Dtype of the outputs."),
            "patch_torch_functions": (ANYTHING, None, "Replace functions of torch."),
            "num_losses": (POSITIVE, 1, "Number of losses."),
            "verbosity": (COUNT, 1, "How much apex prints."),
        },
    ),
    section("torch_autocast", "torch.autocast around forward."),
    refused(
        "torch_autocast.enabled",
        FLAG,
        "Run forward under torch.autocast.",
        default=False,
        instead="leave it out and use torch.autocast in the training loop",
    ),
    *moot(
        "torch_autocast",
        reason="it acts with torch_autocast.enabled only",
        rows={
            "dtype": (optional(TEXT), None, "Dtype of the region."),
            "lower_precision_safe_modules": (optional(TEXTS), None, "Classes that run in it."),
        },
    ),
    section("data_types", "Dtypes of gradients and weights."),
    honoured(
        "data_types.grad_accum_dtype",
        _DTYPE,
        "Dtype in which gradients add up. fp32, also when left out; the working dtype passes "
        "where each update has one backward, which adds nothing.",
        default=None,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "data_types.param_dtype",
        _DTYPE,
        "Dtype of the weights; it must agree with fp16 and bf16.",
        default=None,
        auto=Auto.DEFAULT,
    ),
    refused(
        "data_types.buffer_dtype",
        _DTYPE,
        "Dtype of the model's buffers.",
        default=None,
        auto=Auto.DEFAULT,
    ),
)

KEYS: Final[tuple[Key, ...]] = (*_FP16, *_BF16, *_OTHERS)
