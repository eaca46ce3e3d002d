"""Learning-rate schedules under DeepSpeed's names, as closed formulas.

A curve is a pure function of the step, `lr(step, base)`; `forebay.optim.schedule` puts it into an
optimizer. Step 0 is the first update, and the curve's value at 0 is its rate, as with torch's
schedulers. (DeepSpeed uses a warm-up's value at 0 for two updates, so that all its later rates
come one update late.) No curve brings a rate that nobody wrote: where the configuration names
none, the group's own rate is the peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.config.resolved import SchedulerSpec

__all__ = [
    "Curve",
    "OneCycle",
    "RangeTest",
    "Warmup",
    "WarmupCosine",
    "WarmupDecay",
    "curves",
]


class Curve(Protocol):
    """The rate of one parameter group over time."""

    def lr(self, step: int, base: float) -> float:
        """The learning rate of update `step` (from 0) of a group whose own rate is `base`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """WarmupLR: from `min_lr` to `max_lr` in `num_steps` updates, then constant.

    Attributes:
        min_lr: Rate at step 0.
        max_lr: Rate from step `num_steps` on; None is the group's own.
        num_steps: Updates of warm-up; 0 is none.
        shape: "linear": `step / num_steps` of the way; "log": `log(step + 1) / log(num_steps)`.
    """

    min_lr: float = 0.0
    max_lr: float | None = None
    num_steps: int = 1000
    shape: Literal["log", "linear"] = "log"

    def lr(self, step: int, base: float) -> float:
        """See `Curve`."""
        peak = base if self.max_lr is None else self.max_lr
        return self.min_lr + (peak - self.min_lr) * _warmed(step, self.num_steps, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupDecay:
    """WarmupDecayLR: a warm-up, then a straight line that reaches `min_lr` at `total_steps`.

    Attributes:
        warmup: The first part.
        total_steps: Updates in the run.
    """

    warmup: Warmup
    total_steps: int

    def lr(self, step: int, base: float) -> float:
        """See `Curve`."""
        start, peak = self.warmup.num_steps, self.warmup.lr(self.warmup.num_steps, base)
        if step < start:
            return self.warmup.lr(step, base)
        left = max(0.0, (self.total_steps - step) / max(1, self.total_steps - start))
        return self.warmup.min_lr + (peak - self.warmup.min_lr) * left


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupCosine:
    """WarmupCosineLR: shares of the group's own rate; a warm-up, then half a cosine.

    The cosine reaches `cos_min_ratio` at the last update, `total_steps - 1`, and stays there.

    Attributes:
        total_steps: Updates in the run.
        min_ratio: Share at step 0.
        num_steps: Updates of warm-up; 0 is none.
        cos_min_ratio: Share at the end.
        shape: As in `Warmup`.
    """

    total_steps: int
    min_ratio: float = 0.0
    num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    shape: Literal["log", "linear"] = "log"

    def lr(self, step: int, base: float) -> float:
        """See `Curve`."""
        if step < self.num_steps:
            warmed = _warmed(step, self.num_steps, self.shape)
            return base * (self.min_ratio + (1.0 - self.min_ratio) * warmed)
        length = self.total_steps - self.num_steps
        done = min(1.0, (step - self.num_steps + 1) / length) if length > 0 else 1.0
        cosine = (1.0 + math.cos(math.pi * done)) / 2.0
        return base * (self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeTest:
    """LRRangeTest: a rate that grows without end, to find where training breaks.

    Attributes:
        min_lr: Rate at step 0; None is the group's own.
        step_size: Updates in which it grows by `step_rate` times its start.
        step_rate: See `step_size`.
        staircase: Whether it grows once in `step_size` updates instead of at each.
    """

    min_lr: float | None = None
    step_size: int = 2000
    step_rate: float = 1.0
    staircase: bool = False

    def lr(self, step: int, base: float) -> float:
        """See `Curve`."""
        interval = step // self.step_size if self.staircase else step / self.step_size
        start = base if self.min_lr is None else self.min_lr
        return start * (1.0 + self.step_rate * interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCycle:
    """OneCycle: up, down, then a decay; beta1 moves the other way.

    Attributes:
        min_lr: Rate at both ends of the cycle.
        max_lr: Rate at its top.
        up_steps: Updates of the way up.
        down_steps: Updates of the way down.
        up_stairs: Stairs on the way up; 0 is a straight line.
        down_stairs: Stairs on the way down.
        decay_steps: Unit of steps in the decay; 0 turns it off.
        lr_decay: After the cycle: `min_lr / (1 + lr_decay * steps / decay_steps)`.
        momentum: (lowest, highest) beta1, or None to leave it alone.
        momentum_decay: After the cycle: `highest * (1 + momentum_decay * steps / decay_steps)`.
    """

    min_lr: float
    max_lr: float
    up_steps: int = 2000
    down_steps: int = 2000
    up_stairs: int = 0
    down_stairs: int = 0
    decay_steps: int = 0
    lr_decay: float = 0.0
    momentum: tuple[float, float] | None = (0.8, 0.9)
    momentum_decay: float = 0.0

    def lr(self, step: int, base: float) -> float:
        """See `Curve`; the group's own rate does not matter."""
        del base
        after = self._intervals_after(step)
        if after is None:
            return self.min_lr + (self.max_lr - self.min_lr) * self._height(step)
        return self.min_lr / (1.0 + self.lr_decay * after)

    def beta1(self, step: int) -> float | None:
        """Adam's first decay rate at update `step`; None leaves the group's own."""
        if self.momentum is None:
            return None
        low, high = self.momentum
        after = self._intervals_after(step)
        if after is None:
            return high - (high - low) * self._height(step)
        return high * (1.0 + self.momentum_decay * after)

    def _height(self, step: int) -> float:
        """Where in the cycle: 0 at the ends, 1 at the top."""
        if step <= self.up_steps:
            return _stairs(step / self.up_steps, self.up_stairs)
        return 1.0 - _stairs((step - self.up_steps) / self.down_steps, self.down_stairs)

    def _intervals_after(self, step: int) -> float | None:
        """Decay intervals since the end of the cycle; None within it."""
        after = step - self.up_steps - self.down_steps
        if after <= 0:
            return None
        return after / self.decay_steps if self.decay_steps else 0.0


def curves(spec: SchedulerSpec, *, num_groups: int) -> list[Curve]:
    """The curve of each parameter group.

    Args:
        spec: A resolved schedule; every argument is there.
        num_groups: Number of parameter groups; a list of rates must be as long.
    """
    made: list[Curve] = []
    for group in range(num_groups):
        params = {
            name: _of_group(name, value, group=group, num_groups=num_groups)
            for name, value in spec.params
        }
        made.append(_curve(spec.name, params))
    return made


def _curve(name: str, params: dict[str, Any]) -> Curve:
    if name == "LRRangeTest":
        return RangeTest(
            min_lr=params["lr_range_test_min_lr"],
            step_size=params["lr_range_test_step_size"],
            step_rate=params["lr_range_test_step_rate"],
            staircase=params["lr_range_test_staircase"],
        )
    if name == "OneCycle":
        return _one_cycle(params)
    if name == "WarmupCosineLR":
        return WarmupCosine(
            total_steps=params["total_num_steps"],
            min_ratio=params["warmup_min_ratio"],
            num_steps=params["warmup_num_steps"],
            cos_min_ratio=params["cos_min_ratio"],
            shape=params["warmup_type"],
        )
    warmup = Warmup(
        min_lr=params["warmup_min_lr"],
        max_lr=params["warmup_max_lr"],
        num_steps=params["warmup_num_steps"],
        shape=params["warmup_type"],
    )
    if name == "WarmupLR":
        return warmup
    return WarmupDecay(warmup=warmup, total_steps=params["total_num_steps"])


def _one_cycle(params: dict[str, Any]) -> OneCycle:
    up_steps, down_steps = params["cycle_first_step_size"], params["cycle_second_step_size"]
    up_stairs, down_stairs = params["cycle_first_stair_count"], params["cycle_second_stair_count"]
    return OneCycle(
        min_lr=params["cycle_min_lr"],
        max_lr=params["cycle_max_lr"],
        up_steps=up_steps,
        down_steps=up_steps if down_steps is None else down_steps,
        up_stairs=up_stairs,
        down_stairs=up_stairs if down_stairs is None else down_stairs,
        decay_steps=params["decay_step_size"],
        lr_decay=params["decay_lr_rate"],
        momentum=(params["cycle_min_mom"], params["cycle_max_mom"])
        if params["cycle_momentum"]
        else None,
        momentum_decay=params["decay_mom_rate"],
    )


def _of_group(name: str, value: object, *, group: int, num_groups: int) -> object:
    if not isinstance(value, tuple | list):
        return value
    if len(value) != num_groups:
        raise ConfigError(
            f"config key scheduler.params.{name} has {len(value)} rates, and the optimizer "
            f"{num_groups} parameter groups",
            hint="write one number for all groups, or one for each",
        )
    return value[group]


def _warmed(step: int, num_steps: int, shape: Literal["log", "linear"]) -> float:
    """How much of the warm-up is done, 0 to 1."""
    if step >= num_steps:
        return 1.0
    if shape == "linear":
        return step / num_steps
    # One step of warm-up has log(num_steps) 0; its only step is 0, where nothing is done.
    return math.log(step + 1) / math.log(num_steps) if num_steps > 1 else 0.0


def _stairs(progress: float, count: int) -> float:
    return math.floor(progress * count) / count if count else progress
