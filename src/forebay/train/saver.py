"""What a run saves: its model, and checkpoints to go on from; over ranks all of them take part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.errors import ForebayError
from forebay.train.resume import data_state
from forebay.units_of_measure import counted

if TYPE_CHECKING:
    from pathlib import Path

    from forebay.comm.together import Together
    from forebay.train.corpus import Corpus
    from forebay.train.loop import Loop
    from forebay.train.save import RunFolder

__all__ = ["RunSaver"]

_STAGE_OF_SHARDED_WEIGHTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSaver:
    """Saves one run.

    Attributes:
        engine: What trains.
        folder: Where this rank writes.
        checkpoints: Where all ranks write checkpoints.
        corpus: The data and its tokenizer.
        together: The ranks.
        seed: Chooses the order of the data.
    """

    engine: Any
    folder: RunFolder
    checkpoints: Path
    corpus: Corpus
    together: Together
    seed: int

    def save_model(self) -> None:
        """Save the model on rank 0, with all updates in force; training ends.

        Raises:
            TransferError: It could not be written; an earlier one is as it was.
        """
        self.engine.synchronize()
        self._write_model()

    def _write_model(self) -> None:
        def _work() -> None:
            if self.together.is_first:
                self.folder.save_model(self.engine.module, self.corpus.tokenizer)
            elif self.engine.zero_optimization_stage() == _STAGE_OF_SHARDED_WEIGHTS:
                self.engine.module.state_dict()  # its slices go to the rank that saves

        self.together.run(_work, what="saving the model")

    def save_both(self, loop: Loop) -> None:
        """Save a checkpoint, and the model that training computes with; training goes on.

        Raises:
            CheckpointError: The checkpoint could not be saved; earlier ones are as they were.
            TransferError: The model could not be written.
        """
        self.save_checkpoint(loop)
        # not synchronize(): that would bring updates into force before their time
        self.engine.core.quiesce("saving the model")
        self._write_model()

    def save_checkpoint(self, loop: Loop) -> None:
        """Save a checkpoint.

        Raises:
            CheckpointError: It could not be saved; earlier ones are as they were.
        """
        self.engine.checkpoints.data = data_state(loop, seed=self.seed, store=self.corpus.store)
        self.engine.save_checkpoint(self.checkpoints)

    def rescue(self, loop: Loop) -> str:
        """Save what was trained before a failure where that is possible, and say what is there.

        After a failed update the engine refuses, rightly, to hand out weights.
        """
        if not loop.steps_done:
            return "nothing was trained yet, so nothing was saved"
        try:
            self.save_model()
        except ForebayError:
            kept = "the weights could not be saved"
            if self.folder.model.exists():
                kept += f"; an earlier save is in {self.folder.model}"
            return kept
        return f"the model after {counted(loop.steps_done, 'update')} is in {self.folder.model}"
