"""What a training run is asked to do: one frozen value, whoever asks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from forebay.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

# Updates, or minutes with their unit.
_SAVE_EVERY: Final = re.compile(r"(-?\d+(?:\.\d+)?)\s*(min|minutes?|m)?")

__all__ = [
    "ExistingOutput",
    "GradientCheckpointing",
    "Offload",
    "Packing",
    "SaveEvery",
    "Schedule",
    "TrainOptions",
]


class Offload(Enum):
    """Where optimizer state lives when no configuration says it."""

    NONE = "none"
    """On the device."""
    CPU = "cpu"
    """In host memory."""


class Packing(Enum):
    """How samples become rows of a batch."""

    AUTO = "auto"
    """Text is packed, samples with a prompt are padded."""
    PACK = "pack"
    PAD = "pad"


class Schedule(Enum):
    """The learning rate over the run, after a linear warm-up from a tenth of it."""

    COSINE = "cosine"
    """Down to a tenth, along half a cosine."""
    CONSTANT = "constant"


class GradientCheckpointing(Enum):
    """Whether activations of each block are computed again in backward instead of kept."""

    OFF = "off"
    ON = "on"


class ExistingOutput(Enum):
    """What happens to an output folder that has files in it."""

    REFUSE = "refuse"
    OVERWRITE = "overwrite"
    """A former run's files are replaced; a folder with anything else in it is still refused."""
    RESUME = "resume"
    """A former run goes on; a folder with anything else in it is still refused."""


@dataclass(frozen=True, slots=True)
class SaveEvery:
    """How often a checkpoint is saved: by updates or by time.

    Attributes:
        steps: Updates between two, or None.
        seconds: Seconds between two, or None.
    """

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> SaveEvery:
        """Read "100" (updates) or "30min".

        Raises:
            ConfigError: It is neither, or not positive.

        Example:
            >>> SaveEvery.parse("30min")
            SaveEvery(steps=None, seconds=1800.0)
        """
        found = _SAVE_EVERY.fullmatch(text.strip())
        if found is None:
            raise ConfigError(
                f'cannot read --save-every "{text}"', hint="--save-every 100, or --save-every 30min"
            )
        number, unit = found.groups()
        if unit:
            if not float(number):
                raise ConfigError(f"--save-every {text} is no time", hint="--save-every 30min")
            return cls(seconds=float(number) * 60)
        if "." in number:
            raise ConfigError(f"--save-every {text} is no number of updates", hint="--save-every 1")
        _at_least(1, {"--save-every": int(number)})
        return cls(steps=int(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of `forebay.train.train`.

    Attributes:
        model: A local Hugging Face folder, or a config.json to start from scratch.
        data: Files or folders.
        output: The run's folder; made if it is missing.
        tokenizer: A folder with the tokenizer; None takes the model's.
        config: A DeepSpeed configuration; None makes one from the other options.
        overrides: `key.path=value` texts that change the configuration.
        offload: Where state lives without a configuration; None is `Offload.CPU`.
        steps: Updates to make; None follows `epochs`.
        epochs: Passes over the data; None is 1, unless `steps` is given.
        batch_size: Rows per forward; None leaves it to the configuration, else 8.
        accumulation: Forwards per update; None leaves it to the configuration, else 1.
        sequence_length: Most tokens in a row; None is the model's context, at most 2048.
        packing: How samples become rows.
        truncate: Whether ends of samples that are too long may be cut off.
        learning_rate: Peak rate; None leaves it to the configuration, else 2e-5, or 3e-4 from
            scratch.
        schedule: The rate over the run; None leaves it to the configuration, else cosine.
        warmup_steps: Updates of warm-up; None is a twentieth of the run.
        eval_fraction: Share of the rows held out; None is 2%, at most 256 rows.
        eval_every: Updates between evaluations; None is a fifth of the run.
        save_every: How often a checkpoint and the model are saved; None saves when the run ends
            alone.
        resume: Go on from a checkpoint: its path, or "auto" for the newest complete one in the
            output folder, which may have none yet. None starts anew.
        seed: Of weights made from scratch, order, held-out rows and dropout.
        gradient_checkpointing: Whether activations are computed again.
        device: "auto", "cpu", "cuda" or "cuda:1".
        existing_output: What happens to an output folder that has files in it.
    """

    model: Path
    data: tuple[Path, ...]
    output: Path
    tokenizer: Path | None = None
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    offload: Offload | None = None
    steps: int | None = None
    epochs: float | None = None
    batch_size: int | None = None
    accumulation: int | None = None
    sequence_length: int | None = None
    packing: Packing = Packing.AUTO
    truncate: bool = False
    learning_rate: float | None = None
    schedule: Schedule | None = None
    warmup_steps: int | None = None
    eval_fraction: float | None = None
    eval_every: int | None = None
    save_every: SaveEvery | None = None
    resume: str | None = None
    seed: int = 0
    gradient_checkpointing: GradientCheckpointing = GradientCheckpointing.OFF
    device: str = "auto"
    existing_output: ExistingOutput = ExistingOutput.REFUSE

    def check(self) -> None:
        """Refuse values and pairs that make no sense, before anything is read.

        Raises:
            ConfigError: With the option as it is written on the command line.
        """
        if not self.data:
            raise ConfigError("no data is given", hint="--data FILE, as often as needed")
        _at_least(1, {"--steps": self.steps, "--batch-size": self.batch_size})
        _at_least(1, {"--accumulation": self.accumulation, "--eval-every": self.eval_every})
        _at_least(2, {"--sequence-length": self.sequence_length})
        _at_least(0, {"--warmup-steps": self.warmup_steps})
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(
                f"--seed must lie in 0 to {(1 << 63) - 1}, got {self.seed}", hint="--seed 0"
            )
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"--steps {self.steps} and --epochs {self.epochs:g} both set the length of the run",
                hint="give one of them",
            )
        if self.resume is not None and self.existing_output is ExistingOutput.OVERWRITE:
            raise ConfigError(
                "--resume goes on with a former run and --overwrite replaces it",
                hint="leave one of them out",
            )
        if self.epochs is not None and not 0 < self.epochs < float("inf"):
            raise ConfigError(f"--epochs must be above 0, got {self.epochs:g}", hint="--epochs 1")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise ConfigError(f"--lr must be above 0, got {self.learning_rate:g}", hint="--lr 2e-5")
        if self.eval_fraction is not None and not 0 <= self.eval_fraction < 1:
            raise ConfigError(
                f"--eval-fraction must be from 0 to below 1, got {self.eval_fraction:g}",
                hint="--eval-fraction 0 turns evaluation off",
            )
        if self.config is not None and self.offload is not None:
            raise ConfigError(
                f"--offload {self.offload.value} and --config {self.config} both say where the "
                "optimizer state lives",
                hint="leave one out, or --set zero_optimization.offload_optimizer.device=cpu",
            )


def _at_least(least: int, values: dict[str, int | None]) -> None:
    for option, value in values.items():
        if value is not None and value < least:
            raise ConfigError(
                f"{option} must be at least {least}, got {value}", hint=f"{option} {least}"
            )
