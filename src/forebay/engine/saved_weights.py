"""Saved-tensor hooks that tell when backward needs a weight that lives on the host.

[Note: hooks on top] Autograd asks only the innermost pair of hooks. These are pushed around every
module's forward, so that they are it; whatever lies underneath (checkpointing, `save_on_cpu`) gets
every tensor that is not a streamed weight. Torch does not say what lies underneath. So a tensor
that is not ours is saved once more by a node of our own (`_Keeper`) while our hooks are taken off:
autograd then asks what is underneath, as it would have done. If those are our own hooks of the
module around, that is remembered, and the next tensor goes past them at once. That node gets the
tensor without its history: recomputed layers would keep each other alive through it. Where nothing
lies underneath a tensor is kept as torch keeps it: detached, so that a node does not own itself,
and with its version, which torch does not check where there are hooks.

[Note: backward's own graph] With `create_graph=True` the nodes of a backward save weights (or views
such as `w.t()`) for the next backward, outside of any forward. So the first weight that such a node
asks for puts hooks on top. Nobody takes them off: autograd restores a thread's hooks when a node is
done.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from forebay.engine.activations import KeptActivation, is_kept_by_checkpoint
from forebay.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.engine.activations import ActivationStore
    from forebay.engine.away_reads import AwayReads
    from forebay.engine.unit import Unit

__all__ = ["SavedWeights"]


class _Saved:
    """A tensor as autograd saved it, and of which unit's weights it is a view, if of any."""

    __slots__ = ("tensor", "unit", "version")

    def __init__(self, tensor: torch.Tensor, unit: Unit | None) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.unit = unit


class _Keeper(torch.autograd.Function):
    """A node that saves a tensor under the hooks in force, and is never run."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return anchor.new_empty(0)


class _Underneath:
    """What other hooks made of a tensor; `node` is the output of the `_Keeper` that holds it."""

    __slots__ = ("node",)

    def __init__(self, node: torch.Tensor) -> None:
        self.node = node

    def give(self) -> torch.Tensor:
        tensor: torch.Tensor
        (tensor,) = self.node.grad_fn.saved_tensors  # type: ignore[union-attr]
        return tensor


@dataclass(frozen=True, slots=True)
class _Ground:
    """What lies under hooks of ours.

    Attributes:
        depth: How many of ours lie on it.
        is_bare: Whether it is nothing.
    """

    depth: int
    is_bare: bool


class _Level:
    """One pair of our hooks on the stack of a thread; what is under it stays while it is there."""

    __slots__ = ("ground", "hooks")

    def __init__(self) -> None:
        self.hooks: Any = None
        self.ground: _Ground | None = None


class _Thread(threading.local):
    """A thread's own hooks, outermost first."""

    def __init__(self) -> None:
        self.levels: list[_Level] = []
        # The one of ours that was asked last, and whether Python called for the tensor that it
        # was asked with to be kept by a checkpoint.
        self.heard: _Level | None = None
        self.is_kept: bool | None = None

    def take_heard(self) -> _Level | None:
        """The one that was asked last, and from now on nobody."""
        heard, self.heard = self.heard, None
        return heard


class SavedWeights:
    """A pair of saved-tensor hooks.

    Args:
        units: Every unit.
        activations: Takes what checkpointing keeps; None leaves it where it is.
        use: Called with the unit of a weight that a node of the backward is about to use.
        away_reads: Refuses what weights that are away show.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        activations: ActivationStore | None,
        use: Callable[[Unit], None],
        away_reads: AwayReads,
    ) -> None:
        self._use = use
        self._away_reads = away_reads
        self._activations = activations
        self._own = _Thread()
        self._anchor = torch.empty(0, requires_grad=True)
        self._unit_of = {
            storage._cdata: unit
            for unit in units
            for part in unit.parts
            if part.home is not None
            for storage in part.home.storages
        }
        self._in_backward = saved_tensors_hooks(self._pack_in_backward, self._unpack)

    def push(self) -> None:
        """Put the hooks on top of those in force; the calling thread's alone.

        Raises:
            UnsupportedError: Torch allows none here, as inside `torch.func.grad`.
        """
        level = _Level()
        level.hooks = saved_tensors_hooks(partial(self._pack, level), self._unpack)
        try:
            level.hooks.__enter__()
        except RuntimeError as error:
            raise UnsupportedError(
                "a model whose weights come to the device for use was called where torch allows "
                f"no saved-tensor hooks ({error})",
                hint="use torch.autograd.grad or torch.autograd.functional instead of torch.func, "
                "or keep parameters on the device (over ranks in stage 2)",
            ) from error
        self._own.levels.append(level)

    def pop(self) -> None:
        """Undo the last `push`."""
        self._own.levels.pop().hooks.__exit__(None, None, None)

    @property
    def are_pushed(self) -> bool:
        """Whether they hear of what modules that run in the calling thread save now."""
        return bool(self._own.levels)

    def _pack(self, level: _Level, tensor: torch.Tensor) -> _Saved | _Underneath | KeptActivation:
        own = self._own
        storage = _storage_of(tensor)
        unit = self._unit_of.get(storage)
        if unit is not None:
            return _Saved(tensor, unit)
        if storage in self._away_reads.storages:
            self._away_reads.refuse_saved(tensor)
        own.heard = level
        if level.ground is not None and not level.ground.is_bare:
            return self._save_underneath(level, level.ground.depth, tensor)
        is_kept = own.is_kept
        if is_kept is None and self._activations is not None:
            is_kept = _is_forward() and is_kept_by_checkpoint(sys._getframe(1))
        if level.ground is None:
            found = self._look(level, tensor, is_kept=is_kept)
            if found is not None:
                return found
        if is_kept and self._activations is not None:
            kept = self._activations.keep(tensor)
            if kept is not None:
                return kept
        return _Saved(tensor, None)

    def _pack_in_backward(self, tensor: torch.Tensor) -> _Saved | _Underneath:
        """`_pack` for a node of a backward; see [Note: backward's own graph]."""
        unit = self._unit_of.get(_storage_of(tensor))
        if unit is not None:
            return _Saved(tensor, unit)
        self._in_backward.__exit__(None, None, None)
        try:
            return _Saved(tensor, None) if _nothing_is_pushed() else self._save(tensor)
        finally:
            self._own.take_heard()  # a frame on top of this one must not go past it
            self._in_backward.__enter__()

    def _look(
        self, level: _Level, tensor: torch.Tensor, *, is_kept: bool | None
    ) -> _Underneath | None:
        """Find out what lies under a level, with a tensor that has to be saved anyway.

        Returns:
            The tensor as it was saved there; None where there is nothing.
        """
        own = self._own
        level.hooks.__exit__(None, None, None)
        try:
            if _nothing_is_pushed():
                level.ground = _Ground(1, is_bare=True)
                return None
            own.take_heard()
            own.is_kept = is_kept
            found = self._save(tensor)
            heard = own.take_heard()
        finally:
            own.is_kept = None
            level.hooks.__enter__()
        if heard is None or heard.ground is None:
            level.ground = _Ground(1, is_bare=False)
        else:
            level.ground = _Ground(heard.ground.depth + 1, is_bare=heard.ground.is_bare)
        own.heard = level
        return found

    def _save_underneath(self, level: _Level, depth: int, tensor: torch.Tensor) -> _Underneath:
        """Let the hooks under `depth` of ours save a tensor, of which `level` is the innermost."""
        at = self._own.levels.index(level) + 1
        mine = self._own.levels[at - depth : at]
        for one in reversed(mine):
            one.hooks.__exit__(None, None, None)
        try:
            return self._save(tensor)
        finally:
            for one in mine:
                one.hooks.__enter__()

    def _save(self, tensor: torch.Tensor) -> _Underneath:
        with torch.enable_grad():
            node: torch.Tensor = _Keeper.apply(  # type: ignore[no-untyped-call]
                self._anchor, tensor.detach()
            )
        return _Underneath(node)

    def _unpack(self, saved: _Saved | _Underneath | KeptActivation) -> torch.Tensor:
        if isinstance(saved, _Underneath):
            return saved.give()
        if isinstance(saved, KeptActivation):
            assert self._activations is not None
            return self._activations.give(saved)
        if saved.unit is not None:
            self._use(saved.unit)
            if torch.is_grad_enabled() and not _is_forward():
                self._in_backward.__enter__()
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{saved.tensor.dtype} {list(saved.tensor.shape)}] is at "
                f"version {saved.tensor._version}; expected version {saved.version} instead"
            )
        return saved.tensor


def _nothing_is_pushed() -> bool:
    """Whether no saved-tensor hooks are in force: torch refuses to turn off those that are."""
    try:
        with disable_saved_tensors_hooks("there are some"):
            return True
    except RuntimeError:
        return False


def _is_forward() -> bool:
    return torch._C._current_graph_task_id() < 0


def _storage_of(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage; 0 for tensors that have none of their own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0
