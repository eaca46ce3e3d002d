"""Checkpoints under DeepSpeed's names: what `engine.save_checkpoint` and its companions do.

The format and the work are `forebay.checkpoint` and `forebay.engine`'s.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.compat.flags import check_flags
from forebay.engine.custom_load import load_by_hand
from forebay.engine.import_state import import_torch_state
from forebay.engine.load import LoadRequest, find_checkpoint, load_checkpoint
from forebay.engine.restore import Scope
from forebay.engine.save_request import Latest, SaveRequest, SaveTiming, least_save_bytes
from forebay.engine.saving import CheckpointSaver
from forebay.engine.schedule_state import check_schedule
from forebay.engine.sixteen_bit import save_sixteen_bit
from forebay.engine.snapshot import RunState
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

    from forebay.checkpoint.manifest import Manifest
    from forebay.checkpoint.reader import Checkpoint
    from forebay.compat.steps import MicroSteps
    from forebay.config.resolved import ResolvedConfig
    from forebay.engine.engine import Engine
    from forebay.engine.optimizer import OffloadedOptimizer
    from forebay.engine.restore import Match
    from forebay.engine.save_request import SaveReport

__all__ = ["Checkpoints", "least_bytes"]

_log = logging.getLogger("forebay")


class Checkpoints:
    """Saves and loads the checkpoints of one engine.

    Args:
        core: The engine that does the work.
        optimizer: The optimizer over it.
        steps: Counters and schedule.
        config: Which checkpoints are kept, and whether training goes on while one is written.

    Attributes:
        data: Where the data goes on, saved with the next checkpoint; None where nobody says.
        loaded_data: What `data` was in the checkpoint that was loaded last.
    """

    def __init__(
        self,
        core: Engine,
        *,
        optimizer: OffloadedOptimizer,
        steps: MicroSteps,
        config: ResolvedConfig,
    ) -> None:
        self._core = core
        self._optimizer = optimizer
        self._steps = steps
        self._config = config
        self._saver = CheckpointSaver(core)
        self._shown: SaveReport | None = None
        self.data: dict[str, Any] | None = None
        self.loaded_data: dict[str, Any] | None = None

    @property
    def last(self) -> SaveReport | None:
        """What the last completed save took."""
        return self._saver.last

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written beside training."""
        return self._saver.is_writing

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that training needs to go on with the same bits.

        Legal at any moment, also between the micro-batches of a window: the checkpoint then is
        that of the last update, without the open window's gradients, and training goes on as if
        nothing had been saved. With `checkpoint.writer.decoupled` it returns while the files are
        still written.

        Args:
            save_dir: Folder of checkpoints; made if it is missing.
            tag: The checkpoint's name; None is "global_step" and the number of updates.
            client_state: Plain values of the caller's own, returned when it is loaded.
            save_latest: Whether it is what `load_checkpoint` takes without a tag.
            exclude_frozen_parameters: Leave frozen parameters out.

        Returns:
            True.

        Raises:
            CheckpointError: It (or an earlier one beside training) could not be saved; earlier
                checkpoints are as they were.
        """
        check_flags(
            "save_checkpoint",
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        spec = self._config.checkpoint
        request = SaveRequest(
            folder=Path(save_dir),
            tag=f"global_step{self._steps.global_steps}" if tag is None else str(tag),
            latest=Latest.POINT if save_latest else Latest.LEAVE,
            keep=spec.keep,
            timing=_timing(self._config),
            staging_bytes=spec.staging_bytes,
        )
        scheduler = self._steps.scheduler
        run = RunState(
            counters={
                "global_steps": self._steps.global_steps,
                "micro_steps": self._steps.micro_steps - self._steps.open_micro_steps,
                "global_samples": self._steps.global_samples,
            },
            scheduler=None if scheduler is None else scheduler.state_dict(),
            data=self.data,
            config=self._config.as_dict(),
            client_state={} if client_state is None else client_state,
            excludes_frozen=exclude_frozen_parameters,
        )
        self._saver.save(request, run)
        self._show()
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until a checkpoint that is written beside training is complete.

        Raises:
            CheckpointError: It could not be written.
        """
        self._saver.wait()
        self._show()

    def poll(self) -> None:
        """Raise what a save beside training has met; waits for nothing."""
        self._saver.poll()
        self._show()

    def _show(self) -> None:
        last = self._saver.last
        if last is None or last is self._shown:
            return
        self._shown = last
        if self._config.checkpoint.shows_statistics:
            _log.info(
                "checkpoint %s: %s in %.2f s (%s/s), training stood still for %.2f s",
                last.path,
                format_bytes(last.nbytes),
                last.seconds,
                format_bytes(int(last.nbytes / max(last.seconds, 1e-9))),
                last.stall_seconds,
            )

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint, whatever layout, offload or precision it was saved under.

        Weights and masters are the saved masters, rounded for working weights; an open window is
        discarded. Every byte is verified before anything changes.

        Args:
            load_dir: Folder of checkpoints.
            tag: Which one; None takes what the file `latest` names.
            load_module_strict: Whether names must agree on both sides.
            load_optimizer_states: Whether moments, step counts, groups, loss scale and random
                states are loaded too.
            load_lr_scheduler_states: Whether the schedule goes on where it was.
            load_module_only: Load weights and nothing else, no counters either.
            custom_load_fn: Loads the weights instead: `custom_load_fn(src=..., dst=module)`, with
                the checkpoint's state dict in host memory. Over ranks each calls it, with all of
                the state dict, and it does the same on every rank.

        Returns:
            (the checkpoint's folder, the saved client_state); (None, None) where there is no tag
            and no `latest`.

        Raises:
            CheckpointError: It is missing, damaged or another model's; nothing was changed.
        """
        check_flags(
            "load_checkpoint",
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
        )
        self.wait_for_checkpoint()
        found = find_checkpoint(self._core, Path(load_dir), tag)
        if found is None:
            _log.warning(
                "no checkpoint was loaded: there is no file 'latest' in %s; give a tag", load_dir
            )
            return None, None
        client_state = self.load_folder(
            found,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )
        return str(found), client_state

    def load_folder(
        self,
        found: Path,
        *,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> dict[str, Any]:
        """`load_checkpoint` for a checkpoint's own folder; returns its client_state."""
        self.wait_for_checkpoint()
        everything = load_optimizer_states and not load_module_only
        scheduler = self._steps.scheduler if load_lr_scheduler_states else None

        def _check(manifest: Manifest) -> None:
            if load_lr_scheduler_states and not load_module_only:
                check_schedule(scheduler, manifest.scheduler)

        def _by_hand(checkpoint: Checkpoint, plan: Match) -> None:
            if custom_load_fn is not None:
                load_by_hand(self._core, checkpoint, plan, by=custom_load_fn)

        request = LoadRequest(
            scope=Scope.EVERYTHING if everything else Scope.WEIGHTS,
            is_strict=load_module_strict,
            check=_check,
            then=_by_hand,
        )
        manifest = load_checkpoint(self._core, found, request)
        self._optimizer.show_steps()
        if not load_module_only:
            self._go_on_from(manifest)
            if scheduler is not None and manifest.scheduler is not None:
                scheduler.load_state_dict(manifest.scheduler)
            self.loaded_data = manifest.data
        return manifest.client_state

    def import_torch_state(
        self, model: dict[str, Any], optimizer: dict[str, Any] | None = None
    ) -> None:
        """Go on from a plain PyTorch or Hugging Face training state, the same one on every rank.

        Args:
            model: `model.state_dict()`; float32 values become the masters, exactly.
            optimizer: `state_dict()` of torch's Adam or AdamW over the same groups.

        Raises:
            CheckpointError: Names, shapes or groups differ; nothing was changed.
        """
        self.wait_for_checkpoint()
        import_torch_state(
            self._core, self._optimizer, model_state=model, optimizer_state=optimizer
        )
        self._optimizer.show_steps()
        self._steps.discard()

    def _go_on_from(self, manifest: Manifest) -> None:
        steps, counters = self._steps, manifest.counters
        steps.discard()
        steps.global_steps = counters.get("global_steps", 0)
        steps.micro_steps = counters.get("micro_steps", 0)
        steps.global_samples = counters.get("global_samples", 0)

    def save_16bit_model(
        self,
        save_dir: str | PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the module's weights alone, in 16 bits, as one safetensors file.

        Every rank calls it and rank 0 writes; in stage 3 the weights reach it piece by piece.

        Args:
            save_dir: Where to; made if it is missing.
            save_filename: The file's name; it ends in `.safetensors`, since nothing is pickled.
            exclude_frozen_parameters: Leave frozen parameters out.

        Returns:
            True.

        Raises:
            CheckpointError: The name is of another format, or the file cannot be written.
        """
        check_flags("save_16bit_model", exclude_frozen_parameters=exclude_frozen_parameters)
        save_sixteen_bit(
            self._core,
            Path(save_dir) / save_filename,
            excludes_frozen=exclude_frozen_parameters,
        )
        return True


def least_bytes(config: ResolvedConfig) -> int:
    """Host memory that a rank's checkpoints pass through at least."""
    return least_save_bytes(_timing(config), staging_bytes=config.checkpoint.staging_bytes)


def _timing(config: ResolvedConfig) -> SaveTiming:
    return SaveTiming.BESIDE_TRAINING if config.checkpoint.beside_training else SaveTiming.AT_ONCE
