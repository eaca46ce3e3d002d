"""The configuration of a run: the user's DeepSpeed JSON, or one made from the options.

What the options, the model and the data know goes in as `Facts`, so that every "auto" is answered
and every contradiction is found by `forebay.config`. Nothing here loads a model.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from forebay.config.facts import Facts
from forebay.config.reader import read
from forebay.config.resolve import resolve
from forebay.errors import ConfigError
from forebay.train.options import Offload, Schedule, TrainOptions
from forebay.train.ranks import TrainRanks

if TYPE_CHECKING:
    from forebay.config.resolved import ResolvedConfig
    from forebay.train.model import ModelSource

__all__ = ["Settings"]

_Value = TypeVar("_Value")

_DEFAULT_ROWS: Final = 8
# Fine-tuning moves weights that are good already; from scratch there is a way to go.
_FINE_TUNING_LR: Final = 2e-5
_FROM_SCRATCH_LR: Final = 3e-4
# Stands for the length of a run that is not known yet: no schedule's warm-up is longer.
_UNKNOWN_STEPS: Final = 1 << 40
# A twentieth of the run warms up, where nobody says how much.
_WARMUP_SHARE: Final = 20
# Where warm-up begins and where the cosine ends, as a share of the peak.
_LOW_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A configuration that was read, with what the options add to it.

    Attributes:
        raw: The configuration as a dict, overrides applied and missing sections filled in.
        options: What the run is asked to do.
        source: The model's facts.
        ranks: The ranks that train together.
    """

    raw: dict[str, Any]
    options: TrainOptions
    source: ModelSource
    ranks: TrainRanks = field(default_factory=TrainRanks)

    @classmethod
    def read(
        cls, options: TrainOptions, *, source: ModelSource, ranks: TrainRanks | None = None
    ) -> Settings:
        """Read the configuration file, or make one, and apply the overrides.

        Raises:
            ConfigError: It cannot be read, or an override is no `key.path=value`.
        """
        raw = _made(options) if options.config is None else read(options.config)
        for override in options.overrides:
            _override(raw, override)
        optimizer = raw.get("optimizer")
        if isinstance(optimizer, dict) and "type" not in optimizer:
            raw["optimizer"] = {"type": "AdamW", **optimizer}
        if "scheduler" not in raw:
            shape = options.schedule or Schedule.COSINE
            raw["scheduler"] = _scheduler(shape)
        elif options.schedule is not None:
            raise ConfigError(
                f"--schedule {options.schedule.value} and the configuration's scheduler section "
                "both set the learning rate over the run",
                hint="leave one out",
            )
        return cls(raw=raw, options=options, source=source, ranks=ranks or TrainRanks())

    def draft(self) -> ResolvedConfig:
        """Resolve before the length of the run is known; finds every mistake but that of length.

        Raises:
            ConfigError: See `forebay.config.resolve.resolve`.
        """
        return self._resolve(self.options.steps or _UNKNOWN_STEPS, samples=_UNKNOWN_STEPS)

    def final(self, total_steps: int, *, samples: int | None = None) -> ResolvedConfig:
        """Resolve with the number of updates, and that of the data's samples.

        Raises:
            ConfigError: See `forebay.config.resolve.resolve`.
        """
        return self._resolve(total_steps, samples=samples)

    def _resolve(self, total_steps: int, *, samples: int | None) -> ResolvedConfig:
        options = self.options
        return resolve(
            self.raw,
            facts=Facts(
                world_size=self.ranks.size,
                model_dtype=self._model_dtype(),
                micro_batch_size=options.batch_size,
                accumulation_steps=options.accumulation,
                fallback_micro_batch_size=_DEFAULT_ROWS,
                learning_rate=self._learning_rate(),
                betas=self._if_auto("betas", (0.9, 0.999)),
                eps=self._if_auto("eps", 1e-8),
                weight_decay=self._if_auto("weight_decay", 0.0),
                total_steps=total_steps,
                samples=samples,
                epochs_run_on=True,
                warmup_steps=self._warmup_steps(total_steps),
                asker="forebay train",
            ),
        )

    def _model_dtype(self) -> str:
        """The dtype to load the model in: the folder's, unless the configuration names another.

        A 16-bit section that is switched off means that the user wants the other dtypes, and a
        model is loaded in whichever dtype is asked for, so that is float32.
        """
        dtype = self.source.dtype
        section = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype)
        if section is None:
            return dtype
        enabled = _value(self.raw, section, "enabled")
        return "float32" if enabled is False else dtype

    def _learning_rate(self) -> float | None:
        written = _value(self.raw, "optimizer", "params", "lr")
        if self.options.learning_rate is not None or written not in (None, "auto"):
            return self.options.learning_rate
        return _FROM_SCRATCH_LR if self.source.is_from_scratch else _FINE_TUNING_LR

    def _if_auto(self, name: str, value: _Value) -> _Value | None:
        """Answers an "auto" among the optimizer's arguments, as torch's Adam would."""
        return value if _value(self.raw, "optimizer", "params", name) == "auto" else None

    def _warmup_steps(self, total_steps: int) -> int | None:
        written = _value(self.raw, "scheduler", "params", "warmup_num_steps")
        if self.options.warmup_steps is not None or written not in (None, "auto"):
            return self.options.warmup_steps
        if total_steps == _UNKNOWN_STEPS:
            return 0
        # A schedule may be made for a longer or shorter run than this one.
        planned = _value(self.raw, "scheduler", "params", "total_num_steps")
        return math.ceil((planned if isinstance(planned, int) else total_steps) / _WARMUP_SHARE)


def _made(options: TrainOptions) -> dict[str, Any]:
    offload = options.offload or Offload.CPU
    return {
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": offload.value},
        },
        "forebay": {"keep_checkpoints": 2},
    }


def _scheduler(shape: Schedule) -> dict[str, Any]:
    return {
        "type": "WarmupCosineLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_num_steps": "auto",
            "warmup_type": "linear",
            "warmup_min_ratio": _LOW_SHARE,
            "cos_min_ratio": 1.0 if shape is Schedule.CONSTANT else _LOW_SHARE,
        },
    }


def _override(raw: dict[str, Any], text: str) -> None:
    """Sets one value; `--set a.b=1` is `{"a": {"b": 1}}`. Values are JSON, or else plain text."""
    path, equals, written = text.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(
            f'cannot read the override "{text}"',
            hint="write --set key.path=value, for example --set bf16.enabled=true",
        )
    try:
        value = json.loads(written)
    except ValueError:
        value = written
    at = raw
    for depth, name in enumerate(names[:-1], start=1):
        inner = at.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f'the override "{text}" goes into {".".join(names[:depth])}, which is '
                f"{json.dumps(inner)} and no section",
                hint="name a key of a section, as in the configuration's JSON",
            )
        at = inner
    at[names[-1]] = value


def _value(raw: dict[str, Any], *names: str) -> Any:
    at: Any = raw
    for name in names:
        at = at.get(name) if isinstance(at, dict) else None
    return at
