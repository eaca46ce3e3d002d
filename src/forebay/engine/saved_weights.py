"""Saved-tensor hooks that tell when backward needs a weight that lives on the host.

[Note: hooks on top] Autograd asks only the innermost pair of hooks. These are pushed around every
module's forward, so that they are it; whatever lies underneath (checkpointing, `save_on_cpu`) gets
every tensor that is not a streamed weight. Without anything underneath a tensor is kept as torch
keeps it: detached, so that a node does not own itself, and with its version, which torch does not
check where there are hooks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forebay.engine.activations import KeptActivation, is_kept_by_checkpoint
from forebay.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.engine.activations import ActivationStore
    from forebay.engine.unit import Unit

__all__ = ["SavedWeights"]


class _Saved:
    """A tensor as autograd saved it, and of which unit's weights it is a view, if of any."""

    __slots__ = ("tensor", "unit", "version")

    def __init__(self, tensor: torch.Tensor, unit: Unit | None) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.unit = unit


class _Underneath:
    """What other hooks made of a tensor."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.packed = packed
        self.unpack = unpack


class SavedWeights:
    """A pair of saved-tensor hooks.

    Args:
        units: Every unit.
        activations: Takes what checkpointing keeps; None leaves it where it is.
        use: Called with the unit of a weight that a node of the backward is about to use.

    Raises:
        UnsupportedError: This torch cannot tell which hooks are in force.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        activations: ActivationStore | None,
        use: Callable[[Unit], None],
    ) -> None:
        if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
            raise UnsupportedError(
                f"parameters on the host need a newer torch than {torch.__version__}",
                hint="install torch 2.8 or later, or leave offload_param out",
            )
        self._use = use
        self._activations = activations
        self._pushed: list[Callable[[torch.Tensor], Any]] = []
        self._unit_of = {
            storage._cdata: unit
            for unit in units
            for part in unit.parts
            if part.home is not None
            for storage in part.home.storages
        }

    def push(self) -> None:
        """Put the hooks on top of those in force; the calling thread's alone."""
        below = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003
        pack = partial(self._pack, below)
        torch._C._autograd._push_saved_tensors_default_hooks(pack, self._unpack)
        self._pushed.append(pack)

    def pop(self) -> None:
        """Undo the last `push`."""
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self._pushed.pop()

    @property
    def are_on_top(self) -> bool:
        """Whether they hear of what the calling thread saves now."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003
        return bool(self._pushed) and top is not None and top[0] is self._pushed[-1]

    def _pack(self, below: Any, tensor: torch.Tensor) -> _Saved | _Underneath | KeptActivation:
        unit = self._unit_of.get(_storage_of(tensor))
        if unit is None and below is not None:
            pack, unpack = below
            return _Underneath(pack(tensor), unpack)
        store = self._activations
        if unit is None and store is not None and _is_forward() and is_kept_by_checkpoint():
            kept = store.keep(tensor)
            if kept is not None:
                return kept
        return _Saved(tensor, unit)

    def _unpack(self, saved: _Saved | _Underneath | KeptActivation) -> torch.Tensor:
        if isinstance(saved, _Underneath):
            return saved.unpack(saved.packed)
        if isinstance(saved, KeptActivation):
            assert self._activations is not None
            return self._activations.give(saved)
        if saved.unit is not None:
            self._use(saved.unit)
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{saved.tensor.dtype} {list(saved.tensor.shape)}] is at "
                f"version {saved.tensor._version}; expected version {saved.version} instead"
            )
        return saved.tensor


def _is_forward() -> bool:
    return torch._C._current_graph_task_id() < 0


def _storage_of(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage; 0 for tensors that have none of their own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0
