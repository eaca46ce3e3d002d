"""Going on with a run: what is saved of it beside the engine's state, and finding it again.

A checkpoint of a run says where its data goes on and which data that is; going on with other data
is refused, since nothing else would notice.
"""

from __future__ import annotations

import json
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

    from forebay.comm.together import Together
    from forebay.data.batches import Batches
    from forebay.data.tokens import TokenStore
    from forebay.train.loop import Loop

__all__ = ["data_state", "find_checkpoints", "load_first", "set_position"]

_WINDOW = ("batch_size", "accumulation")
# Enough to tell one data set from another, and milliseconds to read.
_SAMPLE = 1 << 20


def find_checkpoints(resume: str, *, folder: Path, together: Together) -> list[Path]:
    """The checkpoints to try, best first; the same ones on every rank.

    Args:
        resume: "auto", or a path.
        folder: The run's own checkpoints, where "auto" looks.
        together: The ranks; rank 0 looks.

    Raises:
        CheckpointError: There is none at that path.
    """
    what = "looking for checkpoints"

    def _look() -> list[Path]:
        if resume == "auto":
            return CheckpointFolder(folder, disk=RealDisk()).complete()
        return [locate(Path(resume))]

    found = together.first(_look, what=what) or []
    told = together.tell(json.dumps([str(path) for path in found]), what=what)
    return [Path(text) for text in json.loads(told[0])]


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
        "batch_size": batches.rows_at_once,
        "accumulation": batches.shape.accumulation,
    }


def _window_rows(identity: dict[str, Any]) -> int | None:
    rows, forwards = (identity.get(name) for name in _WINDOW)
    return rows * forwards if isinstance(rows, int) and isinstance(forwards, int) else None


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
    here, saved = _identity(loop.batches, seed=seed, store=store), data["identity"]
    # Of these only the product matters to where a window ends: ranks, rows and forwards may change.
    names = [name for name in here if name not in _WINDOW]
    pairs = [(name, saved.get(name), here[name]) for name in names]
    pairs.append(("rows of an update", _window_rows(saved), _window_rows(here)))
    for name, then, now in pairs:
        if then != now:
            raise CheckpointError(
                f"the run was saved with other data or options: {name} was {then}, and is {now}",
                hint="resume with the same data, --seed and --sequence-length, and as many rows "
                "for an update (ranks x --batch-size x --accumulation)",
            )
    for name in ("epoch", "row", "tokens", "skips_in_a_row"):
        if type(data.get(name)) is not int or data[name] < 0:
            raise CheckpointError(f"the checkpoint's place in the data has no proper {name}")
    loop.position = Position(data["epoch"], data["row"])
    loop.tokens_done = data["tokens"]
    loop.skips_in_a_row = data["skips_in_a_row"]
    loop.steps_done = steps
