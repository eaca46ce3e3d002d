"""Checkpoints for a plain loop with `forebay.offload`: a folder, and what goes in and out of it.

The format and the work are those of DeepSpeed's face (`forebay.initialize`): either loads what the
other has saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import CheckpointFolder
from forebay.engine.load import LoadRequest, find_checkpoint, load_checkpoint
from forebay.engine.save_request import SaveRequest, SaveTiming
from forebay.engine.saving import CheckpointSaver
from forebay.engine.schedule_state import check_schedule
from forebay.engine.snapshot import RunState

if TYPE_CHECKING:
    from os import PathLike

    from forebay.checkpoint.manifest import Manifest
    from forebay.engine.optimizer import OffloadedOptimizer
    from forebay.engine.save_request import SaveReport
    from forebay.engine.schedule_state import HasState

__all__ = ["Checkpoints"]

_HINT: Final = "Checkpoints(..., scheduler=scheduler) where it was saved, and only there"


class Checkpoints:
    """A folder of checkpoints of one offloaded model and its optimizer.

    With `SaveTiming.BESIDE_TRAINING`, call `wait` before the program ends, to hear of errors.

    Args:
        optimizer: What `forebay.offload` returned.
        folder: Where they are; made with the first one.
        scheduler: A learning-rate schedule that is saved and loaded with them.
        keep: Complete ones that stay; None keeps all.
        timing: Whether `save` ends before it returns, or training goes on meanwhile.

    Example:
        >>> import tempfile, torch, forebay
        >>> model = torch.nn.Linear(4, 2)
        >>> model, optimizer = forebay.offload(model, torch.optim.AdamW(model.parameters()))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step(); optimizer.zero_grad()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoints = Checkpoints(optimizer, folder, keep=3)
        ...     checkpoints.save("step1", client_state={"epoch": 0})
        ...     checkpoints.load()
        {'epoch': 0}
        >>> optimizer.close()
    """

    def __init__(
        self,
        optimizer: OffloadedOptimizer,
        folder: str | PathLike[str],
        *,
        scheduler: HasState | None = None,
        keep: int | None = None,
        timing: SaveTiming = SaveTiming.AT_ONCE,
    ) -> None:
        self._optimizer = optimizer
        self._folder = Path(folder)
        self._scheduler = scheduler
        self._keep = keep
        self._timing = timing
        self._saver = CheckpointSaver(optimizer.engine)

    @property
    def last(self) -> SaveReport | None:
        """What the last completed save took."""
        return self._saver.last

    def save(self, tag: str | int, *, client_state: dict[str, Any] | None = None) -> None:
        """Save weights, masters, moments, step counts, groups and random states.

        Legal at any moment; an open window's gradients are not saved.

        Args:
            tag: The checkpoint's name; the same name again replaces it.
            client_state: Plain values of the caller's own, which `load` returns.

        Raises:
            CheckpointError: It (or an earlier one beside training) could not be saved; earlier
                checkpoints are as they were.
        """
        engine = self._optimizer.engine
        steps = max((record.step for record in engine.collector.records), default=0)
        run = RunState(
            counters={"global_steps": steps},
            scheduler=None if self._scheduler is None else self._scheduler.state_dict(),
            config={},
            client_state={} if client_state is None else client_state,
        )
        request = SaveRequest(
            folder=self._folder, tag=str(tag), keep=self._keep, timing=self._timing
        )
        self._saver.save(request, run)

    def load(self, tag: str | int | None = None) -> dict[str, Any] | None:
        """Go on from a checkpoint, whatever layout or precision it was saved under.

        Every byte is verified before anything changes; an open window is discarded.

        Args:
            tag: Which one; None takes the latest.

        Returns:
            What `save` was given as client_state; None where there is no checkpoint at all.

        Raises:
            CheckpointError: It is missing, damaged or another model's; nothing was changed.
        """
        self.wait()
        engine = self._optimizer.engine
        found = find_checkpoint(engine, self._folder, tag)
        if found is None:
            folder = CheckpointFolder(self._folder, disk=RealDisk())
            found = next(iter(folder.complete()), None)
        if found is None:
            return None

        def _check(manifest: Manifest) -> None:
            check_schedule(self._scheduler, manifest.scheduler, hint=_HINT)

        manifest = load_checkpoint(engine, found, LoadRequest(check=_check))
        self._optimizer.show_steps()
        if self._scheduler is not None and manifest.scheduler is not None:
            self._scheduler.load_state_dict(manifest.scheduler)
        return manifest.client_state

    def wait(self) -> None:
        """Wait until a checkpoint that is written beside training is complete.

        Raises:
            CheckpointError: It could not be written; training may go on.
        """
        self._saver.wait()
