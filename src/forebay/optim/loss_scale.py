"""Loss scaling for fp16: static, or dynamic with DeepSpeed's fields and meanings.

A scale is a power of two, so scaling and unscaling change no bit of a gradient that neither
overflows nor underflows. The scaler only keeps the number; the engine multiplies losses by it and
puts its inverse into the update's scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from forebay.errors import ConfigError, GradientError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DynamicLossScale", "LossScale", "LossScaleConfig", "StaticLossScale"]

# Far above any useful scale (fp16 overflows at 2^16), and 1 / (scale * ranks) stays a normal
# float32 (2^-126 at the smallest) for up to 2^26 ranks. Reached only when gradients are all zero.
_MAX_SCALE = 2.0**100


class LossScale(Protocol):
    """The scale of losses: read before each backward, told the outcome of each update.

    Call order, all by the engine: `value` for every loss of a window; `update` once per window,
    in `step()`; `state_dict` and `load_state_dict` between windows.
    """

    @property
    def value(self) -> float:
        """What losses are multiplied by now."""

    def update(self, *, overflowed: bool) -> None:
        """Take note of a window; call it after the update was applied or skipped."""

    def state_dict(self) -> dict[str, int | float]:
        """Plain numbers, so that a checkpoint of it is JSON."""

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Go on from saved numbers."""


class StaticLossScale:
    """A scale that never changes; 1 is "no scaling". Two of one value are equal.

    Args:
        value: A power of two.
    """

    def __init__(self, value: float = 1.0) -> None:
        self._value = _power_of_two(value, key="fp16.loss_scale")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticLossScale) and other.value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    @property
    def value(self) -> float:
        """What losses are multiplied by."""
        return self._value

    def update(self, *, overflowed: bool) -> None:
        """Nothing to learn: an overflow skips the update and the scale stays."""
        del overflowed

    def state_dict(self) -> dict[str, int | float]:
        """The scale, for comparison at load."""
        return {"scale": self._value}

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Keep the configured scale: a user who changes it before resuming means it."""
        del state


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleConfig:
    """Settings of a dynamic scale, in the words of DeepSpeed's `fp16` section.

    Attributes:
        initial_scale_power: The first scale is 2 to this power.
        loss_scale_window: Windows without overflow after which the scale doubles.
        hysteresis: Overflows that are forgiven, minus one, before the scale is halved.
        consecutive_hysteresis: Whether every good window restores the hysteresis, instead of
            only one that doubles the scale.
        min_loss_scale: The scale does not go below this power of two.
    """

    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0

    def __post_init__(self) -> None:
        _power_of_two(self.min_loss_scale, key="fp16.min_loss_scale")
        if not self.min_loss_scale <= 2.0**self.initial_scale_power <= _MAX_SCALE:
            raise ConfigError(
                f"fp16.initial_scale_power is {self.initial_scale_power}; its scale must lie "
                f"between fp16.min_loss_scale ({self.min_loss_scale:g}) and 2**100"
            )
        for key in ("loss_scale_window", "hysteresis"):
            if getattr(self, key) < 1:
                raise ConfigError(f"fp16.{key} is {getattr(self, key)}; it must be 1 or more")


class DynamicLossScale:
    """A scale that halves on overflow and doubles after a quiet time.

    Args:
        config: When it moves.

    Example:
        >>> scale = DynamicLossScale(LossScaleConfig(initial_scale_power=4, hysteresis=1))
        >>> scale.update(overflowed=True)
        >>> scale.value
        8.0
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self._config = config
        self._value = 2.0**config.initial_scale_power
        self._hysteresis = config.hysteresis
        self._windows = 0
        # DeepSpeed starts here too: the first doubling comes after loss_scale_window windows.
        self._last_overflow = -1

    @property
    def value(self) -> float:
        """What losses are multiplied by now."""
        return self._value

    def update(self, *, overflowed: bool) -> None:
        """Take note of a window.

        Raises:
            GradientError: A gradient overflowed though the scale was already at its minimum.
        """
        config = self._config
        if overflowed:
            self._last_overflow = self._windows
            if self._hysteresis > 1:
                self._hysteresis -= 1
            elif self._value == config.min_loss_scale:
                self._windows += 1
                raise GradientError(
                    f"gradients overflowed at the smallest loss scale, {self._value:g} "
                    f"(window {self._windows - 1})",
                    hint="lower the learning rate, train in bf16, or lower fp16.min_loss_scale",
                )
            else:
                self._value = max(self._value / 2.0, config.min_loss_scale)
        else:
            if config.consecutive_hysteresis:
                self._hysteresis = config.hysteresis
            if (self._windows - self._last_overflow) % config.loss_scale_window == 0:
                self._hysteresis = config.hysteresis
                self._value = min(self._value * 2.0, _MAX_SCALE)
        self._windows += 1

    def state_dict(self) -> dict[str, int | float]:
        """The scale and its counters, as plain numbers."""
        return {
            "scale": self._value,
            "hysteresis": self._hysteresis,
            "windows": self._windows,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Go on from saved numbers; a scale below the configured minimum is raised to it."""
        scale = _power_of_two(float(state["scale"]), key="loss_scale.scale")
        self._value = min(max(scale, self._config.min_loss_scale), _MAX_SCALE)
        self._hysteresis = min(int(state["hysteresis"]), self._config.hysteresis)
        self._windows = int(state["windows"])
        self._last_overflow = int(state["last_overflow"])


def _power_of_two(value: float, *, key: str) -> float:
    """The value, if it is a power of two that float32 and its inverse represent."""
    if value > 0.0 and math.isfinite(value):
        fraction, exponent = math.frexp(value)
        if fraction == 0.5 and -100 <= exponent - 1 <= 100:
            return float(value)
        nearest = 2.0 ** min(100, max(-100, round(math.log2(value))))
        raise ConfigError(
            f"{key} is {value:g}; a loss scale is a power of two, so that it changes no bit",
            hint=f"set {key} to {nearest:g}",
        )
    raise ConfigError(f"{key} is {value:g}; it must be a positive power of two")
