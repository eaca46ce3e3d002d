"""The run's folder: made and checked before anything is loaded, filled without half-written files.

resolved_config.json   the configuration with every value written out
metrics.jsonl          one line per update or evaluation
summary.json           how the run ended
plan.json              what was measured and foretold, for forebay plan --learn
tensorboard/           the same figures for TensorBoard
model/                 what AutoModelForCausalLM.from_pretrained loads
checkpoints/           what --resume goes on from, a folder each
tokenizer/             what forebay export puts beside a checkpoint's weights
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError

from forebay.checkpoint.locate import CHECKPOINTS, TOKENIZER
from forebay.errors import ConfigError, TransferError
from forebay.hardware.reason import reason_of
from forebay.plan.run_record import RUN_RECORD
from forebay.train.options import ExistingOutput
from forebay.units_of_measure import counted, format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from forebay.data.tokenize import Tokenizer

__all__ = ["RunFolder"]

_CONFIG: Final = "resolved_config.json"
_METRICS: Final = "metrics.jsonl"
_SUMMARY: Final = "summary.json"
_TENSORBOARD: Final = "tensorboard"
_MODEL: Final = "model"
_PARTIAL: Final = ".model.partial"
_REPLACED: Final = ".model.replaced"
_PARTIAL_TOKENIZER: Final = f".{TOKENIZER}.partial"
_OURS: Final = frozenset(
    {
        _CONFIG,
        _METRICS,
        _SUMMARY,
        _TENSORBOARD,
        _MODEL,
        _PARTIAL,
        _REPLACED,
        CHECKPOINTS,
        TOKENIZER,
        _PARTIAL_TOKENIZER,
        RUN_RECORD,
        *(f".{name}.partial" for name in (_CONFIG, _METRICS, _SUMMARY, RUN_RECORD)),
    }
)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder that one run writes.

    Attributes:
        path: Where it is.
        claim: Keeps other runs out until `release`.
    """

    path: Path
    claim: _Claim | None = None

    @classmethod
    def prepare(cls, path: Path, *, existing: ExistingOutput) -> RunFolder:
        """Make the folder and prove that it can be written; a former run in it stays for now.

        Raises:
            ConfigError: It has files in it, or cannot be written.
        """
        try:
            found = {item.name for item in path.iterdir()} if path.exists() else set()
            _refuse_contents(path, found=found, existing=existing)
            path.mkdir(parents=True, exist_ok=True)
            claim = _Claim(path)
            probe = path / ".writable"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            reason, hint = reason_of(error, hint="--output names a folder that you may write to")
            raise ConfigError(
                f"cannot write to the output folder {path}: {reason}", hint=hint
            ) from error
        return cls(path, claim)

    def release(self) -> None:
        """Let other runs in: this one has ended."""
        if self.claim is not None:
            self.claim.release()

    def begin(self, config: str) -> None:
        """Clear away a former run, except for its model, and write the resolved configuration.

        The model stays until a new one takes its place.
        """
        for name in (_METRICS, _SUMMARY, RUN_RECORD):
            (self.path / name).unlink(missing_ok=True)
        for name in (_TENSORBOARD, CHECKPOINTS):
            shutil.rmtree(self.path / name, ignore_errors=True)
        self._write(_CONFIG, config)

    def go_on(self, config: str, *, steps: int, is_evaluated_again: bool) -> list[dict[str, Any]]:
        """Keep of a former run what was before an update, and write the configuration.

        Args:
            config: The resolved configuration.
            steps: Updates that the checkpoint has.
            is_evaluated_again: Whether the evaluation after the last of them comes again.

        Returns:
            The lines of metrics that stay.
        """
        (self.path / _SUMMARY).unlink(missing_ok=True)
        kept = []
        if self.metrics.exists():
            for line in self.metrics.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except ValueError:
                    continue  # torn by a kill
                last = steps - (1 if "eval_loss" in record and is_evaluated_again else 0)
                if record["step"] <= last:
                    kept.append(record)
        self._write(_METRICS, "".join(json.dumps(record) + "\n" for record in kept))
        self._write(_CONFIG, config)
        return kept

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / _METRICS

    @property
    def tensorboard(self) -> Path:
        """A folder of event files."""
        return self.path / _TENSORBOARD

    @property
    def checkpoints(self) -> Path:
        """A folder of checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def model(self) -> Path:
        """The saved model and tokenizer."""
        return self.path / _MODEL

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write how the run ended."""
        self._write(_SUMMARY, json.dumps(summary, indent=2) + "\n")

    def write_record(self, name: str, text: str) -> None:
        """Write a record of the run beside its summary."""
        self._write(name, text)

    def keep_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Write the tokenizer for later exports, all at once.

        Raises:
            TransferError: It could not be written.
        """
        partial, final = self.path / _PARTIAL_TOKENIZER, self.path / TOKENIZER
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            tokenizer.save(partial)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
        except OSError as error:
            reason, hint = reason_of(error)
            raise TransferError(
                f"cannot write the tokenizer to {final}: {reason}", hint=hint
            ) from error

    def require_room(self, model_bytes: int, *, checkpoint_bytes: int = 0) -> None:
        """Refuse a disk that cannot take the model, before hours are spent on it.

        Args:
            model_bytes: Of the model.
            checkpoint_bytes: Of a checkpoint, where the run is to save any.

        Raises:
            ConfigError: With both sizes.
        """
        free = shutil.disk_usage(self.path).free
        needed = model_bytes + checkpoint_bytes
        if free < needed:
            what = "the model takes"
            if checkpoint_bytes:
                what = f"the model and a checkpoint of {format_bytes(checkpoint_bytes)} take"
            raise ConfigError(
                f"{what} {format_bytes(needed)} on disk, and {self.path} has "
                f"{format_bytes(free)} left",
                hint="make room, or choose another --output",
            )

    def save_model(self, model: Any, tokenizer: Tokenizer) -> None:
        """Save a model and its tokenizer all at once: the old folder, or the whole new one.

        Args:
            model: A `PreTrainedModel` whose weights are all new (after `engine.synchronize()`).
            tokenizer: Saved beside it.

        Raises:
            TransferError: It could not be written; what was saved before is still there.
        """
        partial, replaced = self.path / _PARTIAL, self.path / _REPLACED
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            model.save_pretrained(str(partial))
            tokenizer.save(partial)
            for file in partial.iterdir():
                _flush(file)
            shutil.rmtree(replaced, ignore_errors=True)
            if self.model.exists():
                self.model.rename(replaced)
            partial.rename(self.model)
            shutil.rmtree(replaced, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise TransferError(
                f"cannot save the model to {self.model}: {reason}",
                hint=f"{format_bytes(shutil.disk_usage(self.path).free)} are free there",
            ) from error

    def _write(self, name: str, text: str) -> None:
        """Writes a small file all at once."""
        partial = self.path / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path / name)


class _Claim:
    """Holds a folder until `release`, or until the process ends, however it ends.

    The lock is the kernel's, on the folder itself: no file can be left behind.

    Args:
        path: The folder.

    Raises:
        ConfigError: Another run holds it.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            raise ConfigError(
                f"another run is writing to the output folder {path}",
                hint="choose another --output, or wait for that run to end",
            ) from error

    def release(self) -> None:
        """Let other runs in (idempotent)."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _refuse_contents(path: Path, *, found: set[str], existing: ExistingOutput) -> None:
    if not found:
        return
    if existing is ExistingOutput.REFUSE:
        raise ConfigError(
            f"the output folder {path} is not empty "
            f"({counted(len(found), 'entry', plural='entries')})",
            hint="choose another --output, --resume the run in it, or --overwrite it",
        )
    strangers = sorted(found - _OURS)
    if strangers:
        raise ConfigError(
            f"the output folder {path} holds {strangers[0]}, which no run of forebay wrote",
            hint="only a former run can be replaced or go on; choose another --output",
        )


def _flush(file: Path) -> None:
    """Makes the file's bytes durable before its folder gets the name that readers look for."""
    if file.is_file():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
