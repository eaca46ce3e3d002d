"""Going on with a run: what is saved of it beside the engine's state, and finding it again.

A checkpoint of a run says where its data goes on and which data that is; going on with other data
is refused, since nothing else would notice.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import CheckpointFolder
from forebay.checkpoint.locate import locate
from forebay.data.batches import Position
from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.data.batches import Batches
    from forebay.data.tokens import TokenStore
    from forebay.train.loop import Loop

__all__ = ["data_state", "find_checkpoints", "load_first", "set_position"]

# Enough to tell one data set from another, and milliseconds to read.
_SAMPLE = 1 << 20


def find_checkpoints(resume: str, *, folder: Path) -> list[Path]:
    """The checkpoints to try, best first.

    Args:
        resume: "auto", or a path.
        folder: The run's own checkpoints, where "auto" looks.

    Raises:
        CheckpointError: There is none at that path.
    """
    if resume == "auto":
        return CheckpointFolder(folder, disk=RealDisk()).complete()
    return [locate(Path(resume))]


def load_first(engine: Any, paths: list[Path], *, say: Callable[[str], None]) -> Path | None:
    """Load the first checkpoint that is whole; None where there are none at all.

    Raises:
        CheckpointError: None of them can be loaded; the first one's reason.
    """
    reasons: list[CheckpointError] = []
    for path in paths:
        try:
            engine.checkpoints.load_folder(path)
        except CheckpointError as error:
            reasons.append(error)
            if len(reasons) < len(paths):
                say(f"{error.message}; trying the one before it")
        else:
            return path
    if reasons:
        raise reasons[0]
    return None


def data_state(loop: Loop, *, seed: int, store: TokenStore) -> dict[str, Any]:
    """Where the data goes on, and what tells this data from other data."""
    return {
        "epoch": loop.position.epoch,
        "row": loop.position.row,
        "tokens": loop.tokens_done,
        "skips_in_a_row": loop.skips_in_a_row,
        "identity": _identity(loop.batches, seed=seed, store=store),
    }


def _identity(batches: Batches, *, seed: int, store: TokenStore) -> dict[str, Any]:
    ids = store.ids
    sample = zlib.crc32(ids[:_SAMPLE].tobytes(), zlib.crc32(ids[-_SAMPLE:].tobytes()))
    return {
        "rows": batches.num_rows,
        "tokens": len(ids),
        "sample_crc32": sample,
        "seed": seed,
        "batch_size": batches.shape.rows,
        "accumulation": batches.shape.accumulation,
    }


def set_position(
    loop: Loop, data: dict[str, Any] | None, *, seed: int, store: TokenStore, steps: int
) -> None:
    """Put a loop where a checkpoint was saved.

    Raises:
        CheckpointError: It was saved by something else than `forebay train`, or with other data.
    """
    if data is None or not isinstance(data.get("identity"), dict):
        raise CheckpointError(
            "the checkpoint does not say where its data goes on: forebay train did not save it",
            hint="load it with engine.load_checkpoint, or export it and train from the export",
        )
    here = _identity(loop.batches, seed=seed, store=store)
    for name, value in here.items():
        if data["identity"].get(name) != value:
            raise CheckpointError(
                f"the run was saved with other data or options: {name} was "
                f"{data['identity'].get(name)}, and is {value}",
                hint="resume with the same data, --seed, --batch-size, --accumulation and "
                "--sequence-length",
            )
    for name in ("epoch", "row", "tokens", "skips_in_a_row"):
        if type(data.get(name)) is not int or data[name] < 0:
            raise CheckpointError(f"the checkpoint's place in the data has no proper {name}")
    loop.position = Position(data["epoch"], data["row"])
    loop.tokens_done = data["tokens"]
    loop.skips_in_a_row = data["skips_in_a_row"]
    loop.steps_done = steps
