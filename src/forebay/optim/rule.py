"""Adam's rule: from a torch parameter group to the numbers of one update.

It reads hyperparameters and refuses options that forebay cannot honour. It updates nothing; see
`forebay.optim.reference` for the formula that takes these numbers.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from forebay.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["AdamRule", "DecayMode", "Hyper", "WeightDecay", "float32"]


class WeightDecay(Enum):
    """How an optimizer class means its `weight_decay`."""

    DECOUPLED = "decoupled"
    """AdamW: the weight shrinks by `lr * weight_decay`, beside the gradient."""
    L2 = "l2"
    """Adam: `weight_decay * weight` is added to the gradient and passes through the moments."""


class DecayMode(Enum):
    """What one captured update does about decay; the values are the native core's names."""

    DECOUPLED = "decoupled"
    """Multiply the weight by `Hyper.decay` before the update."""
    L2 = "l2"
    """Add `Hyper.decay * weight` to the gradient."""
    NONE = "none"
    """Neither: the group's weight decay is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """The numbers of one update of one segment, captured at `step()`.

    Each is computed in double precision from the group's options and rounded once to float32
    (the float attributes hold values that float32 represents exactly).

    Attributes:
        decay_mode: What `decay` means.
        decay: `1 - lr * weight_decay` (decoupled), `weight_decay` (l2), or 0.
        one_minus_beta1: `1 - beta1`.
        beta2: `beta2`.
        one_minus_beta2: `1 - beta2`.
        eps: `eps`.
        bias_correction2_sqrt: `sqrt(1 - beta2 ** step)`.
        step_size: `lr / (1 - beta1 ** step)`.
        sign: -1 for a group with `maximize`, else 1. No kernel reads it: the caller multiplies
            the gradient scale by it, which is exact.
    """

    decay_mode: DecayMode
    decay: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    bias_correction2_sqrt: float
    step_size: float
    sign: float = 1.0

    def native(self) -> tuple[str, float, float, float, float, float, float, float]:
        """The arguments of the native core's `Hyper`, in its order."""
        return (
            self.decay_mode.value,
            self.decay,
            self.one_minus_beta1,
            self.beta2,
            self.one_minus_beta2,
            self.eps,
            self.bias_correction2_sqrt,
            self.step_size,
        )


class AdamRule:
    """Adam and AdamW as torch defines them.

    Args:
        weight_decay: What a group's `weight_decay` means unless the group itself says so (torch
            writes `decoupled_weight_decay` into the groups of both classes). The name decides:
            "Adam" is never taken for AdamW.

    Example:
        >>> rule = AdamRule(WeightDecay.DECOUPLED)
        >>> group = {"lr": 0.5, "betas": (0.5, 0.5), "eps": 1e-8, "weight_decay": 0.5}
        >>> rule.capture(group, step=1).step_size
        1.0
    """

    def __init__(self, weight_decay: WeightDecay) -> None:
        self.weight_decay = weight_decay

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> AdamRule:
        """The rule of a client's optimizer, with every group validated.

        Raises:
            UnsupportedError: The optimizer is not exactly `torch.optim.Adam` or `AdamW` (a
                subclass may compute something else), or a group uses an option that is refused.
        """
        kinds: dict[type, WeightDecay] = {
            torch.optim.Adam: WeightDecay.L2,
            torch.optim.AdamW: WeightDecay.DECOUPLED,
        }
        kind = type(optimizer)
        if kind not in kinds:
            raise UnsupportedError(
                f"forebay updates torch.optim.Adam and torch.optim.AdamW, not "
                f"{kind.__module__}.{kind.__qualname__}",
                hint="pass torch.optim.AdamW(model.parameters(), lr=...)",
            )
        rule = cls(kinds[kind])
        for group in optimizer.param_groups:
            rule.validate(group)
        return rule

    def validate_all(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Check all groups of an optimizer, each alone and beside the others.

        Raises:
            UnsupportedError: See `validate`, or groups have different directions.
            ConfigError: See `validate`.
        """
        for group in groups:
            self.validate(group)
        if len({bool(group.get("maximize")) for group in groups}) > 1:
            raise UnsupportedError(
                "some parameter groups have maximize=True and others not",
                hint="negate the loss of one of them instead",
            )

    def validate(self, group: Mapping[str, Any]) -> None:
        """Check a group's options; `foreach` and `fused` are hints and always accepted.

        Raises:
            UnsupportedError: `amsgrad`, `capturable` or `differentiable` is set, or the learning
                rate is a tensor that requires a gradient.
            ConfigError: A number is missing, not finite or out of its range.
        """
        for option, reason in _REFUSED.items():
            if group.get(option):
                raise UnsupportedError(
                    f"optimizer option {option}=True is not supported: {reason}",
                    hint=f"build the optimizer with {option}=False",
                )
        lr = _number(group, "lr")
        beta1, beta2 = _betas(group)
        eps = _number(group, "eps")
        decay = _number(group, "weight_decay")
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", decay)):
            if value < 0.0:
                raise ConfigError(f"optimizer option {name} is {value}; it must be 0 or more")
        for index, value in enumerate((beta1, beta2)):
            if not 0.0 <= value < 1.0:
                raise ConfigError(
                    f"optimizer option betas[{index}] is {value}; it must lie in [0, 1)"
                )

    def options_of(self, group: Mapping[str, Any]) -> dict[str, object]:
        """What of a group's options an update is made with, as it is now.

        Raises:
            ConfigError: A number is missing or not finite.
        """
        default = self.weight_decay is WeightDecay.DECOUPLED
        return {
            "lr": _number(group, "lr"),
            "betas": _betas(group),
            "eps": _number(group, "eps"),
            "weight_decay": _number(group, "weight_decay"),
            "decoupled_weight_decay": bool(group.get("decoupled_weight_decay", default)),
            "maximize": bool(group.get("maximize")),
        }

    def capture(self, group: Mapping[str, Any], step: int) -> Hyper:
        """Read a group's options as they are now, for an update with this step count.

        Args:
            group: A parameter group; a tensor `lr` is read by value (on an accelerator that
                waits for the device).
            step: The parameter's own count of updates, this one included; 1 is the first.

        Raises:
            UnsupportedError: See `validate`.
            ConfigError: See `validate`.
        """
        if step < 1:
            raise ValueError(f"step {step} of an update; the first is 1")
        self.validate(group)
        lr = _number(group, "lr")
        beta1, beta2 = _betas(group)
        weight_decay = _number(group, "weight_decay")
        if weight_decay == 0.0:
            mode, decay = DecayMode.NONE, 0.0
        elif group.get("decoupled_weight_decay", self.weight_decay is WeightDecay.DECOUPLED):
            mode, decay = DecayMode.DECOUPLED, 1.0 - lr * weight_decay
        else:
            mode, decay = DecayMode.L2, weight_decay
        return Hyper(
            decay_mode=mode,
            decay=float32(decay),
            one_minus_beta1=float32(1.0 - beta1),
            beta2=float32(beta2),
            one_minus_beta2=float32(1.0 - beta2),
            eps=float32(_number(group, "eps")),
            bias_correction2_sqrt=float32(math.sqrt(1.0 - beta2**step)),
            step_size=float32(lr / (1.0 - beta1**step)),
            sign=-1.0 if group.get("maximize") else 1.0,
        )


def float32(value: float) -> float:
    """The float32 value nearest to a double (ties to even; infinite where it overflows)."""
    return ctypes.c_float(value).value


_REFUSED = {
    "amsgrad": "its third moment has no place in the state layout",
    "capturable": "the step count lives on the host",
    "differentiable": "the update runs outside autograd",
}


def _number(group: Mapping[str, Any], name: str) -> float:
    if name not in group:
        raise ConfigError(f"an optimizer group has no option {name}")
    return _finite(group[name], name)


def _betas(group: Mapping[str, Any]) -> tuple[float, float]:
    if "betas" not in group:
        raise ConfigError("an optimizer group has no option betas")
    try:
        first, second = group["betas"]
    except (TypeError, ValueError):
        raise ConfigError(
            f"optimizer option betas is {group['betas']!r}, not two numbers"
        ) from None
    return _finite(first, "betas[0]"), _finite(second, "betas[1]")


def _finite(value: float | torch.Tensor, name: str) -> float:
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise UnsupportedError(
                f"optimizer option {name} is a tensor that requires a gradient; "
                "the update runs outside autograd",
                hint=f"pass {name} as a number, or detach it",
            )
        if value.numel() != 1:
            raise ConfigError(f"optimizer option {name} has {value.numel()} values instead of 1")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"optimizer option {name} is {value!r}, not a number") from None
    if not math.isfinite(number) or not math.isfinite(float32(number)):
        raise ConfigError(f"optimizer option {name} is {number}; it must be a finite float32")
    return number
