"""A parameter that has a recipe and no memory, until somebody gives it a place to live.

It is what `forebay.zero.Init` leaves of a parameter, and what a weight in a file is before it is
read. It can be counted, cast, copied and put into an optimizer; what would read or write a
parameter's elements raises. A tensor that is no parameter yet can be cut, joined and turned too, as
loaders do with what a file holds: that is one more step of its recipe.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_iter, tree_leaves, tree_map, tree_unflatten

from forebay.errors import UnsupportedError

__all__ = ["UnbuiltWeight", "WeightRecipe", "build_in_place", "put_in_place", "value_of"]

_aten = torch.ops.aten
_RENAMING: Final = (_aten.detach.default, _aten.alias.default)
# They compute nothing, so that doing them later cannot change a bit.
_MOVES: Final = frozenset(
    {
        _aten._reshape_alias.default,
        _aten._unsafe_view.default,
        _aten.cat.default,
        _aten.clone.default,
        _aten.expand.default,
        _aten.permute.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.squeeze.dim,
        _aten.stack.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unbind.int,
        _aten.unsqueeze.default,
        _aten.view.default,
    }
)


class WeightRecipe(Protocol):
    """How a weight comes about, and what it will look like."""

    @property
    def size(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def stride(self) -> tuple[int, ...]:
        """Its strides, in elements."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that `make` gives it."""
        ...

    def make(self) -> torch.Tensor:
        """The weight, in memory of its own or over a file's pages; nobody writes into it."""
        ...

    def fingerprint(self) -> str:
        """Equal on two ranks that would make the same."""
        ...


class UnbuiltWeight(torch.Tensor):
    """A weight with shape and dtype, whose elements are made when they are asked for.

    Attributes:
        recipe: Makes them, perhaps in another dtype.
    """

    recipe: WeightRecipe

    @staticmethod
    def __new__(
        cls: type[UnbuiltWeight],
        recipe: WeightRecipe,
        *,
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> UnbuiltWeight:
        """Make one of a dtype of its own."""
        weight = torch.Tensor._make_wrapper_subclass(
            cls,
            recipe.size,
            strides=recipe.stride,
            dtype=dtype,
            device=torch.device("cpu"),
            requires_grad=requires_grad,
        )
        weight.recipe = recipe
        return weight

    def build(self) -> torch.Tensor:
        """Its elements, as `WeightRecipe.make` gives them, in its own dtype."""
        return self.recipe.make().to(self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        """Shape and dtype, without elements."""
        return f"UnbuiltWeight(shape={list(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Another parameter of the same recipe."""
        copied = nn.Parameter(
            UnbuiltWeight(self.recipe, dtype=self.dtype), requires_grad=self.requires_grad
        )
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what asks for no elements, and refuse the rest."""
        kwargs = kwargs or {}
        weight = args[0] if args else None
        if isinstance(weight, UnbuiltWeight):
            if func in _RENAMING:
                return UnbuiltWeight(weight.recipe, dtype=weight.dtype)
            if func is _aten._to_copy.default and _only_casts(kwargs):
                return _cast(weight, kwargs["dtype"])
            if func is _aten.equal.default:  # a loader's look at weights that may be tied
                return torch.equal(*map(value_of, args))
        weights = [item for item in tree_iter((args, kwargs)) if isinstance(item, UnbuiltWeight)]
        if func in _MOVES and not any(isinstance(item, nn.Parameter) for item in weights):
            return _move(func, args, kwargs)
        raise UnsupportedError(
            f"{func} wants the elements of a weight of shape {list(weights[0].shape)}, which was "
            "built inside forebay.zero.Init, or is in a file, and has no memory before "
            "forebay.initialize",
            hint="change it inside Init, or inside forebay.zero.GatheredParameters(weight), which "
            "gives it memory",
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Moved:
    """A `WeightRecipe`: one of the results of an operation that computes nothing.

    Attributes:
        func: The operation.
        args: Positional and named arguments; tensors are unbuilt weights.
        position: Which of its results is meant.
    """

    func: Any
    args: tuple[Any, dict[str, Any]]
    position: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        """See `WeightRecipe`."""
        args, kwargs = tree_map(_built, self.args)
        with torch.no_grad():
            made: torch.Tensor = tree_leaves(self.func(*args, **kwargs))[self.position]
        return made

    def fingerprint(self) -> str:
        """See `WeightRecipe`."""
        told = tree_map(_told, self.args)
        return hashlib.sha256(f"{self.func} {told} {self.position}".encode()).hexdigest()[:16]


def _built(item: Any) -> Any:
    return item.build() if isinstance(item, UnbuiltWeight) else item


def _told(item: Any) -> Any:
    return (item.recipe.fingerprint(), item.dtype) if isinstance(item, UnbuiltWeight) else item


def _move(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation of `_MOVES` gives, done when elements are asked for."""

    def _shape_of(item: Any) -> Any:
        if not isinstance(item, UnbuiltWeight):
            return item
        return torch.empty_strided(item.size(), item.stride(), dtype=item.dtype, device="meta")

    results = func(*tree_map(_shape_of, args), **tree_map(_shape_of, kwargs))
    leaves, spec = torch.utils._pytree.tree_flatten(results)
    moved = [
        UnbuiltWeight(
            _Moved(
                func=func,
                args=(args, kwargs),
                position=position,
                size=tuple(leaf.size()),
                stride=leaf.stride(),
                dtype=leaf.dtype,
            ),
            dtype=leaf.dtype,
        )
        for position, leaf in enumerate(leaves)
    ]
    return tree_unflatten(moved, spec)


def _cast(weight: UnbuiltWeight, dtype: torch.dtype) -> UnbuiltWeight:
    if weight.dtype is weight.recipe.dtype:
        return UnbuiltWeight(weight.recipe, dtype=dtype)
    # Rounded already: what it is to become is made of the rounded elements.
    moved: UnbuiltWeight = _move(_aten._to_copy.default, (weight,), {"dtype": dtype})
    return moved


def _only_casts(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    others = {name for name, value in kwargs.items() if value not in (None, False)}
    on_host = device is None or torch.device(device).type == "cpu"
    return kwargs.get("dtype") is not None and on_host and others <= {"dtype", "device"}


def value_of(param: torch.Tensor) -> torch.Tensor:
    """A parameter's elements, made or read where it has no memory yet; not to be written into."""
    return param.build() if isinstance(param, UnbuiltWeight) else param.data


def build_in_place(param: torch.Tensor) -> None:
    """Give an unbuilt parameter its elements; it stays the same object."""
    assert isinstance(param, UnbuiltWeight)
    put_in_place(param, param.build())


def put_in_place(param: torch.Tensor, value: torch.Tensor) -> None:
    """Let an unbuilt parameter have these elements from now on; it stays the same object."""
    if value.device.type == "cpu" and not value.untyped_storage().resizable():
        value = value.clone()  # pages of a file, which somebody may write again
    built = nn.Parameter(value, requires_grad=param.requires_grad)
    torch.utils.swap_tensors(param, built)
