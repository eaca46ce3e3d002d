"""Rows of the optimizer and the learning-rate schedule."""

from __future__ import annotations

from typing import Final

from forebay.config.keys import Auto, Key, hint, honoured, refused, section
from forebay.config.kinds import (
    BETAS,
    COUNT,
    FLAG,
    INTEGER,
    NON_NEGATIVE,
    NUMBER,
    POSITIVE,
    POSITIVE_NUMBER,
    RATES,
    SHARE,
    TEXT,
    choice,
    optional,
)

__all__ = ["KEYS"]

_ONE_KERNEL: Final = "there is one fused update, the same bits everywhere"
_AUTO: Final = Auto.CALLER

_OPTIMIZER: Final[tuple[Key, ...]] = (
    section("optimizer", "The optimizer, where none is handed to `initialize`."),
    honoured(
        "optimizer.type",
        TEXT,
        '"Adam" or "AdamW" (in any case): what the names mean in torch.optim.',
        default=None,
    ),
    section("optimizer.params", "Arguments of the optimizer."),
    hint(
        "optimizer.legacy_fusion",
        FLAG,
        "Older fused kernel for mixed precision.",
        default=False,
        reason=_ONE_KERNEL,
    ),
    honoured(
        "optimizer.params.lr",
        NON_NEGATIVE,
        "Learning rate; a schedule with rates of its own overrides it.",
        default=1e-3,
        auto=_AUTO,
        fact="learning_rate",
    ),
    honoured(
        "optimizer.params.betas",
        BETAS,
        "Decay rates of the two moments.",
        default=(0.9, 0.999),
        auto=_AUTO,
        fact="betas",
    ),
    honoured(
        "optimizer.params.eps",
        POSITIVE_NUMBER,
        "Added to the root of the second moment.",
        default=1e-8,
        auto=_AUTO,
        fact="eps",
    ),
    honoured(
        "optimizer.params.weight_decay",
        NON_NEGATIVE,
        "Weight decay: decoupled in AdamW, L2 in Adam. 0 as in DeepSpeed; torch's AdamW has 0.01.",
        default=0.0,
        auto=_AUTO,
        fact="weight_decay",
    ),
    honoured(
        "optimizer.params.adam_w_mode",
        FLAG,
        "Required with `Adam` and a weight decay: true is decoupled (AdamW), false is L2.",
        default=None,
    ),
    hint(
        "optimizer.params.torch_adam",
        FLAG,
        "Use torch's kernel.",
        default=False,
        reason="the arithmetic is torch's already, in one fused pass",
    ),
    hint(
        "optimizer.params.fused",
        optional(FLAG),
        "torch.optim's choice of kernel.",
        default=None,
        reason=_ONE_KERNEL,
    ),
    hint(
        "optimizer.params.foreach",
        optional(FLAG),
        "torch.optim's choice of kernel.",
        default=None,
        reason=_ONE_KERNEL,
    ),
    hint(
        "optimizer.params.set_grad_none",
        FLAG,
        "Whether `zero_grad` sets gradients to None.",
        default=True,
        reason="it always does",
    ),
    refused("optimizer.params.amsgrad", FLAG, "Keep the largest second moment.", default=False),
    refused(
        "optimizer.params.bias_correction",
        FLAG,
        "Correct the moments' start at zero.",
        default=True,
    ),
    refused(
        "optimizer.params.maximize", FLAG, "Go up the gradient instead of down.", default=False
    ),
    refused(
        "optimizer.params.fp32_optimizer_states",
        FLAG,
        "Keep the moments in fp32.",
        default=True,
    ),
    refused(
        "optimizer.params.max_grad_norm",
        NUMBER,
        "Clipping in the place where old configurations have it.",
        default=None,
        accepts=(),
        reason="clipping is set at the top level, once",
        instead='write "gradient_clipping" at the top level',
    ),
)

_WARMUPS: Final = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_LINEAR_WARMUPS: Final = ("WarmupLR", "WarmupDecayLR")
_RANGE: Final = ("LRRangeTest",)
_CYCLE: Final = ("OneCycle",)

_SCHEDULER: Final[tuple[Key, ...]] = (
    section("scheduler", "The learning-rate schedule; its value at step 0 governs update 0."),
    honoured(
        "scheduler.type",
        TEXT,
        '"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle" or "LRRangeTest".',
        default=None,
    ),
    section("scheduler.params", "Arguments of the schedule."),
    honoured(
        "scheduler.params.warmup_min_lr",
        RATES,
        "Rate at step 0.",
        default=0.0,
        auto=Auto.DEFAULT,
        only_for=_LINEAR_WARMUPS,
    ),
    honoured(
        "scheduler.params.warmup_max_lr",
        RATES,
        "Rate after warm-up. Left out it is the optimizer's own rate, not DeepSpeed's hidden "
        "0.001.",
        default=None,
        auto=Auto.DEFAULT,
        only_for=_LINEAR_WARMUPS,
    ),
    honoured(
        "scheduler.params.warmup_num_steps",
        COUNT,
        "Updates of warm-up; 0 is none.",
        default=1000,
        auto=_AUTO,
        fact="warmup_steps",
        only_for=_WARMUPS,
    ),
    honoured(
        "scheduler.params.warmup_type",
        choice("log", "linear"),
        "Shape of the warm-up.",
        default="log",
        only_for=_WARMUPS,
    ),
    honoured(
        "scheduler.params.total_num_steps",
        POSITIVE,
        "Updates in the whole run; required.",
        default=None,
        auto=_AUTO,
        fact="total_steps",
        only_for=("WarmupDecayLR", "WarmupCosineLR"),
    ),
    honoured(
        "scheduler.params.warmup_min_ratio",
        SHARE,
        "Rate at step 0, as a share of the optimizer's.",
        default=0.0,
        only_for=("WarmupCosineLR",),
    ),
    honoured(
        "scheduler.params.cos_min_ratio",
        SHARE,
        "Rate at the end, as a share of the optimizer's.",
        default=0.0001,
        only_for=("WarmupCosineLR",),
    ),
    honoured(
        "scheduler.params.lr_range_test_min_lr",
        RATES,
        "Rate at step 0. Left out it is the optimizer's own rate, not DeepSpeed's hidden 0.001.",
        default=None,
        only_for=_RANGE,
    ),
    honoured(
        "scheduler.params.lr_range_test_step_size",
        POSITIVE,
        "Updates in which the rate grows by `lr_range_test_step_rate` times its start.",
        default=2000,
        only_for=_RANGE,
    ),
    honoured(
        "scheduler.params.lr_range_test_step_rate",
        NON_NEGATIVE,
        "Growth in `lr_range_test_step_size` updates.",
        default=1.0,
        only_for=_RANGE,
    ),
    honoured(
        "scheduler.params.lr_range_test_staircase",
        FLAG,
        "Grow in steps instead of continuously.",
        default=False,
        only_for=_RANGE,
    ),
    honoured(
        "scheduler.params.cycle_min_lr",
        NON_NEGATIVE,
        "Rate at both ends of the cycle; required.",
        default=None,
        only_for=_CYCLE,
    ),
    honoured(
        "scheduler.params.cycle_max_lr",
        NON_NEGATIVE,
        "Rate at the top of the cycle; required.",
        default=None,
        only_for=_CYCLE,
    ),
    honoured(
        "scheduler.params.decay_lr_rate",
        NON_NEGATIVE,
        "After the cycle the rate is `cycle_min_lr / (1 + decay_lr_rate * steps / "
        "decay_step_size)`.",
        default=0.0,
        only_for=_CYCLE,
    ),
    honoured(
        "scheduler.params.cycle_first_step_size",
        POSITIVE,
        "Updates of the way up.",
        default=2000,
        only_for=_CYCLE,
    ),
    honoured(
        "scheduler.params.cycle_second_step_size",
        optional(POSITIVE),
        "Updates of the way down; left out, as many as up.",
        default=None,
        only_for=_CYCLE,
    ),
    honoured(
        "scheduler.params.cycle_first_stair_count",
        COUNT,
        "Stairs on the way up; 0 is a straight line.",
        default=0,
        only_for=_CYCLE,
    ),
    honoured(
        "scheduler.params.cycle_second_stair_count",
        optional(COUNT),
        "Stairs on the way down; left out, as many as up.",
        default=None,
        only_for=_CYCLE,
    ),
    honoured(
        "scheduler.params.decay_step_size",
        COUNT,
        "Unit of steps for the decay after the cycle; 0 turns it off.",
        default=0,
        only_for=_CYCLE,
    ),
    honoured(
        "scheduler.params.cycle_momentum",
        FLAG,
        "Move beta1 against the rate; beta2 stays the group's own.",
        default=True,
        only_for=_CYCLE,
    ),
    honoured(
        "scheduler.params.cycle_min_mom",
        SHARE,
        "beta1 at the top of the cycle.",
        default=0.8,
        only_for=_CYCLE,
    ),
    honoured(
        "scheduler.params.cycle_max_mom",
        SHARE,
        "beta1 at both ends of the cycle.",
        default=0.9,
        only_for=_CYCLE,
    ),
    honoured(
        "scheduler.params.decay_mom_rate",
        NON_NEGATIVE,
        "After the cycle beta1 is `cycle_max_mom * (1 + decay_mom_rate * steps / "
        "decay_step_size)`.",
        default=0.0,
        only_for=_CYCLE,
    ),
    refused(
        "scheduler.params.last_batch_iteration",
        INTEGER,
        "Where the schedule starts.",
        default=-1,
        reason="a schedule starts at step 0, or where the checkpoint says",
    ),
)

KEYS: Final[tuple[Key, ...]] = (*_OPTIMIZER, *_SCHEDULER)
