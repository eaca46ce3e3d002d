"""Building a model whose parameters do not lie in memory together.

Everything runs as it would without it, in the same order and with the same random numbers, and is
written down on the way (`model.recipes`). The memory of parameters is a window: those that were
touched last have their elements, those before have given them back, and get them again from their
recipes when an operation touches them. Buffers and other tensors are left alone.

[Note: what is kept] A parameter keeps its memory where its recipe cannot make it to the bit (values
from files or from other threads, very long histories), where it is small, and where somebody else
holds a tensor over the same memory. Recipes of more than one operation are tried before they are
trusted.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from forebay.model.notebook import Notebook
from forebay.model.recipes import Place, Recipe
from forebay.model.unbuilt import UnbuiltWeight

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.model.recipes import Value

__all__ = ["Construction", "is_under_construction"]

# A recipe's generator state takes 5 KiB; below a few of those there is nothing to win.
_SMALLEST_BYTES: Final = 64 << 10
_WINDOW_BYTES: Final = 32 << 20


class Construction(TorchDispatchMode):
    """Inside it, parameters give their memory back while others are built; after it, all have.

    Args:
        window_bytes: How much of them has memory at a time, beside the one at work.
        smallest_bytes: Smaller parameters keep theirs.
        dtype: What float32 parameters are afterwards, where none has this dtype already; None
            leaves them.
        freed: Told how many bytes were just given back.
    """

    def __init__(
        self,
        *,
        window_bytes: int = _WINDOW_BYTES,
        smallest_bytes: int = _SMALLEST_BYTES,
        dtype: torch.dtype | None = None,
        freed: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._window_bytes, self._smallest_bytes = window_bytes, smallest_bytes
        self._dtype = dtype
        self._freed = freed
        self._notebook = Notebook()
        self._owners: dict[int, weakref.ref[nn.Module]] = {}
        # Storages of parameters by address: with elements, the last touched last; and without.
        self._here: dict[int, StorageWeakRef] = {}
        self._away: dict[int, tuple[StorageWeakRef, Value]] = {}
        # Those that could not give their memory back when it was their turn.
        self._held: dict[int, StorageWeakRef] = {}
        self._here_bytes = 0
        self._is_trying = False
        # Holders of a storage that one tensor sees: that tensor, and Python's own object.
        one = torch.empty(1, device="cpu")
        self._alone = _holders(one.untyped_storage())
        self._hooks: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and torch would import its compiler, which takes seconds.
        return False

    def __enter__(self) -> Self:
        self._hooks = [
            register_module_parameter_registration_hook(self._on_parameter),
            register_module_module_registration_hook(self._on_module),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._leave()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation over tensors that have their elements, and write it down."""
        kwargs = kwargs or {}
        if self._is_trying:
            return func(*args, **kwargs)
        note = self._notebook.begin(func, args, kwargs)
        unfilled = []
        for storage in note.storages:
            value = self._touch(storage)
            if value is not None and storage._cdata in note.overwritten:
                unfilled.append((storage, value))
            elif value is not None:
                value.make(storage)
        try:
            results = func(*args, **kwargs)
        except BaseException:
            for storage, value in unfilled:
                value.make(storage)
            raise
        self._notebook.end(note, results)
        self._make_room(keep={storage._cdata for storage in note.storages})
        return results

    def _on_parameter(self, module: nn.Module, name: str, param: Any) -> None:
        del name
        self._owners[id(module)] = weakref.ref(module)
        if not _may_leave(param):
            return
        storage = param.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if nbytes >= self._smallest_bytes and key not in {*self._here, *self._away, *self._held}:
            self._here[key] = StorageWeakRef(storage)
            self._here_bytes += nbytes
            self._make_room(keep={key})

    def _on_module(self, module: nn.Module, name: str, child: Any) -> None:
        # Copies of modules get their parameters without a word.
        del module, name
        if child is not None:
            for owner in child.modules():
                for key, param in owner._parameters.items():
                    self._on_parameter(owner, key, param)

    def _touch(self, storage: torch.UntypedStorage) -> Value | None:
        """Let a storage have memory; what has to be written there if it had none."""
        key = storage._cdata
        if key in self._here:
            self._here[key] = self._here.pop(key)
        if key not in self._away:
            return None
        self._here[key], value = self._away.pop(key)
        storage.resize_(value.nbytes)
        self._here_bytes += value.nbytes
        return value

    def _make_room(self, *, keep: set[int]) -> None:
        """Let those that were touched first give back their memory."""
        if self._here_bytes <= self._window_bytes:
            return
        for key in [key for key in self._here if key not in keep]:
            if self._here_bytes <= self._window_bytes:
                break
            if not self._send_away(key):
                self._held[key] = self._here.pop(key)
                self._count_here()

    def _count_here(self) -> None:
        storages = {key: _storage(ref) for key, ref in self._here.items()}
        self._here = {key: self._here[key] for key, s in storages.items() if s is not None}
        self._here_bytes = sum(s.nbytes() for s in storages.values() if s is not None)

    def _send_away(self, key: int) -> bool:
        """Whether a storage of `_here` could give its memory back."""
        ref = self._here[key]
        storage = _storage(ref)
        if storage is None:
            return False
        value = self._notebook.value_of(storage)
        if value is None or not self._is_alone(storage):
            return False
        if not value.is_one_draw and not self._makes(value, storage):
            self._notebook.forget(storage)
            return False
        del self._here[key]
        self._here_bytes -= value.nbytes
        self._away[key] = ref, value
        storage.resize_(0)
        self._freed(value.nbytes)
        return True

    def _is_alone(self, storage: torch.UntypedStorage) -> bool:
        """Whether one tensor alone sees a storage; numpy arrays over it count too."""
        return storage.resizable() and _holders(storage) <= self._alone

    def _makes(self, value: Value, storage: torch.UntypedStorage) -> bool:
        # Hooks of registration run where operations are still watched.
        self._is_trying = True
        try:
            again = torch.UntypedStorage(value.nbytes)
            value.make(again)
            return torch.equal(_words(again), _words(storage))
        finally:
            self._is_trying = False

    def _leave(self) -> None:
        """Leave recipes in place of parameters, and elements wherever there is none."""
        self._here |= self._held
        modules = [owner for ref in self._owners.values() if (owner := ref()) is not None]
        params = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
        dtype = self._dtype
        if any(param.dtype is dtype for param in params.values()):
            dtype = None
        for param in params.values():
            cast = dtype if dtype is not None and param.dtype is torch.float32 else param.dtype
            if not self._leave_recipe(param, cast) and cast is not param.dtype:
                param.data = param.data.to(cast)
        for ref, value in self._away.values():
            storage = _storage(ref)
            if storage is not None:
                storage.resize_(value.nbytes)
                value.make(storage)

    def _leave_recipe(self, param: nn.Parameter, dtype: torch.dtype) -> bool:
        """Whether it could be left in place of the parameter's memory."""
        if not _may_leave(param):
            return False
        storage = param.untyped_storage()
        key = storage._cdata
        if key in self._here:
            self._send_away(key)
        if key not in self._away:
            return False
        value = self._away[key][1]
        if self._is_alone(storage):
            recipe = Recipe(value, Place.of(param, value.key))
            unbuilt = UnbuiltWeight(recipe, dtype=dtype)
            other = nn.Parameter(unbuilt, requires_grad=param.requires_grad)
            # Refused where C++ or a weak reference holds the parameter: it then keeps its memory.
            with contextlib.suppress(RuntimeError):
                torch.utils.swap_tensors(param, other)
                return True
        self._touch(storage)
        value.make(storage)
        return False


def _may_leave(param: Any) -> bool:
    return (
        isinstance(param, torch.Tensor)
        and type(param) is nn.Parameter
        and param.device.type == "cpu"
        and param.layout is torch.strided
    )


def _storage(ref: StorageWeakRef) -> torch.UntypedStorage | None:
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return found


def _holders(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def _words(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def is_under_construction() -> bool:
    """Whether this thread builds a model inside a `Construction`."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, Construction) for mode in modes)
