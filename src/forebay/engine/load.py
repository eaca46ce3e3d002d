"""Loads a checkpoint on all ranks: each reads what it needs, and none changes before all may.

It orders the steps; `engine.restore` knows what goes where.
"""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import CheckpointFolder
from forebay.checkpoint.reader import Checkpoint
from forebay.comm.together import Together
from forebay.engine.duty import Duty
from forebay.engine.restore import Scope, match, restore, restore_in_force
from forebay.engine.whole_state import gather_weights
from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forebay.checkpoint.manifest import Manifest
    from forebay.engine.duty import Duty
    from forebay.engine.engine import Engine
from forebay.engine.restore import Match

__all__ = ["LoadRequest", "find_checkpoint", "load_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What of a checkpoint is loaded.

    Attributes:
        scope: How much.
        is_strict: Whether every name on either side must be on the other too.
        check: Refuses a manifest whose other values do not fit the caller's.
        then: Called with the open checkpoint once its state is in the engine; None does nothing.
    """

    scope: Scope = Scope.EVERYTHING
    is_strict: bool = True
    check: Callable[[Manifest], None]
    then: Callable[[Checkpoint, Match], Any] | None = None


def _together(engine: Engine) -> Together:
    return Together.of(engine.options.group, "loading", otherwise=CheckpointError)


def find_checkpoint(engine: Engine, folder: Path, tag: object | None) -> Path | None:
    """The checkpoint with a tag, or the one that `latest` names; the same one on every rank.

    Raises:
        CheckpointError: There is no complete one with that tag, or ranks find different ones.
    """
    together, what = _together(engine), f"looking for a checkpoint in {folder}"
    found = together.run(lambda: CheckpointFolder(folder, disk=RealDisk()).find(tag), what=what)
    names = together.tell("" if found is None else found.name, what=what)
    for rank, name in enumerate(names):
        if name != names[0]:
            raise CheckpointError(
                f"rank {rank} finds {name or 'no checkpoint'} in {folder}, where rank 0 finds "
                f"{names[0] or 'none'}",
                hint="all ranks load from one folder, on a file system that all machines share",
            )
    return found


def load_checkpoint(engine: Engine, found: Path, request: LoadRequest) -> Manifest:
    """Go on from a checkpoint, whatever ranks, layout or precision it was saved under.

    Every byte is verified before anything changes, each by one of the ranks; an open window is
    discarded.

    Args:
        engine: Where to; over several ranks all of them call this.
        found: The checkpoint's own folder.
        request: What of it.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: It is missing, damaged or another model's; nothing was changed.
        StateAwayError: State has left the device; nothing was changed.
    """
    together, what = _together(engine), f"loading {found}"
    _refuse_other_requests(together, request, found=found)
    with contextlib.ExitStack() as stack:

        def _verify() -> tuple[Checkpoint, Match]:
            # here, where nothing has changed on any rank
            engine._barrier.refuse_away("load_checkpoint")
            checkpoint = stack.enter_context(Checkpoint(found))
            plan = match(engine, checkpoint, scope=request.scope, is_strict=request.is_strict)
            request.check(checkpoint.manifest)
            plan.verify(checkpoint, Duty.of(engine.options.group))
            return checkpoint, plan

        checkpoint, plan = together.run(_verify, what=what)
        _refuse_different(together, checkpoint.manifest, found=found)
        try:
            together.run(lambda: restore(engine, checkpoint, plan), what=what)
        except BaseException as error:
            if together.size > 1:
                engine._barrier.fail(f"loading {found} stopped half way: {error}")
            raise
        gather_weights(engine)
        if restore_in_force(engine, checkpoint, plan):
            gather_weights(engine)
        if request.then is not None:
            request.then(checkpoint, plan)
        return checkpoint.manifest


def _refuse_other_requests(together: Together, request: LoadRequest, *, found: Path) -> None:
    """A rank that loads moments beside one that does not would go on from another state."""
    strict = "strict" if request.is_strict else "not strict"
    told = together.tell(f"{request.scope.value}, {strict}", what=f"loading {found}")
    for rank, other in enumerate(told):
        if other != told[0]:
            raise CheckpointError(
                f"rank {rank} loads {found} otherwise than rank 0: {other} instead of {told[0]}",
                hint="every rank loads with the same arguments",
            )


def _refuse_different(together: Together, manifest: Manifest, *, found: Path) -> None:
    """Copies on several machines may be of different saves."""
    here = repr((manifest.files, manifest.counters, manifest.parameters)).encode()
    told = together.tell(str(zlib.crc32(here)), what=f"loading {found}")
    if len(set(told)) > 1:
        rank = next(rank for rank, other in enumerate(told) if other != told[0])
        raise CheckpointError(f"{found} on rank {rank} is another checkpoint than on rank 0")
