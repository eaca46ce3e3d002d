"""What stands in `p.grad` for a gradient that has left: a tensor without storage.

Reading it is answered with the exact gradient, or raises with a hint; it is never silently
wrong. Autograd adds the next addend into it, which is how the window hears of addends after the
first. It is not a gradient and owns none.

[Note: views of a stand-in] A view (`p.grad[0]`, `p.grad.view(-1)`) is a stand-in too: it reads
through its base, and writing to it raises. Were it a plain copy, `p.grad[0] = 0` would be lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_any, tree_flatten, tree_map, tree_unflatten

from forebay.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["GradientOwner", "StandIn"]

_aten = torch.ops.aten
_ZEROING = (_aten.zero_.default, _aten._foreach_zero_.default)
_RENAMING = (_aten.detach.default, _aten.alias.default, _aten.detach_.default)
_WRITE_HINT = (
    "clip with clip_norm=... or optimizer.clip_grad_norm_(max_norm), scale the loss instead of "
    "gradients, change gradients in p.register_hook(...), or put a tensor of your own into p.grad"
)


class GradientOwner(Protocol):
    """Whoever holds the gradient that a stand-in stands for."""

    def add_addend(self, addend: torch.Tensor) -> None:
        """One more addend arrived through the stand-in."""

    def zero(self) -> None:
        """The gradient was set to zero."""

    def read(self) -> torch.Tensor:
        """The exact gradient so far, on the parameter's device; raises GradientError."""
        ...

    @property
    def label(self) -> str:
        """The parameter's name."""
        ...


class StandIn(torch.Tensor):
    """A storage-less gradient with the parameter's shape, dtype and device."""

    owner: GradientOwner

    @staticmethod
    def __new__(
        cls: type[StandIn],
        like: torch.Tensor,
        owner: GradientOwner,
        *,
        device: torch.device | None = None,
    ) -> StandIn:
        """Make a stand-in with the form of `like` for a gradient that `owner` holds."""
        standin = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            dtype=like.dtype,
            device=device or like.device,
            requires_grad=False,
        )
        standin.owner = owner
        return standin

    def __init__(
        self, like: torch.Tensor, owner: GradientOwner, *, device: torch.device | None = None
    ) -> None:
        """All is done in `__new__`, as tensor subclasses need."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StandIn(gradient of {self.owner.label}, held by forebay)"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self.owner.read().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.owner.read().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """The exact gradient as an array of its own."""
        return self.owner.read().clone().numpy(force=force)

    def tolist(self) -> Any:
        """The exact gradient as nested lists."""
        return self.owner.read().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer one operation on stand-ins."""
        kwargs = kwargs or {}
        if func in _RENAMING:
            return args[0]
        if func in _ZEROING:
            for standin in _stand_ins(args):
                standin.owner.zero()
            return args[0]
        if func is _aten.add_.Tensor and isinstance(args[0], StandIn) and not kwargs:
            args[0].owner.add_addend(args[1])
            return args[0]
        _refuse_writes(func, args, kwargs)
        if args and isinstance(args[0], StandIn) and _is_view(func):
            return _views(func, args, kwargs)

        def _read(value: Any) -> Any:
            return value.owner.read() if isinstance(value, StandIn) else value

        return func(*tree_map(_read, args), **tree_map(_read, kwargs))


class _View:
    """Reads a view of a gradient through its base; see [Note: views of a stand-in]."""

    def __init__(self, base: StandIn, take: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._base = base
        self._take = take

    @property
    def label(self) -> str:
        return self._base.owner.label

    def read(self) -> torch.Tensor:
        return self._take(self._base.owner.read())

    def zero(self) -> None:
        raise _written("zero_", self.label)

    def add_addend(self, addend: torch.Tensor) -> None:
        del addend
        raise _written("add_", self.label)


def _is_view(func: Any) -> bool:
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in func._schema.returns
    )


def _views(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stand-ins for the results of a view operation on a stand-in."""
    base, rest = args[0], args[1:]
    shape = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    shapes, spec = tree_flatten(func(shape, *rest, **kwargs))

    def _take(index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def _one(value: torch.Tensor) -> torch.Tensor:
            taken: torch.Tensor = tree_flatten(func(value, *rest, **kwargs))[0][index]
            return taken

        return _one

    views = [
        StandIn(like, _View(base, _take(index)), device=base.device)
        for index, like in enumerate(shapes)
    ]
    return tree_unflatten(views, spec)


def _stand_ins(args: Any) -> list[StandIn]:
    found: list[StandIn] = []

    def _collect(value: Any) -> Any:
        if isinstance(value, StandIn):
            found.append(value)
        return value

    tree_map(_collect, args)
    return found


def _refuse_writes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    schema = func._schema  # type: ignore[attr-defined]
    given = [*zip(schema.arguments, args, strict=False)]
    given += [(arg, kwargs[arg.name]) for arg in schema.arguments if arg.name in kwargs]
    for declared, value in given:
        written = declared.alias_info is not None and declared.alias_info.is_write
        if written and tree_any(lambda leaf: isinstance(leaf, StandIn), value):
            raise _written(schema.name, _stand_ins(value)[0].owner.label)


def _written(operation: str, label: str) -> GradientError:
    return GradientError(
        f"{operation} would change p.grad of {label} in place, but that gradient has left for "
        "the host",
        hint=_WRITE_HINT,
    )
