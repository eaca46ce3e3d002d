"""A parameter that has a recipe and no memory, until somebody gives it a place to live.

It is what `forebay.zero.Init` leaves of a parameter. It can be counted, cast, copied and put into
an optimizer; whatever would read or write its elements raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forebay.errors import UnsupportedError

if TYPE_CHECKING:
    from forebay.model.recipes import Recipe

__all__ = ["UnbuiltWeight", "build_in_place"]

_aten = torch.ops.aten
_RENAMING = (_aten.detach.default, _aten.alias.default)


class UnbuiltWeight(torch.Tensor):
    """A weight with shape and dtype, whose elements are made when they are asked for.

    Attributes:
        recipe: Makes them, in the dtype that they were drawn in.
    """

    recipe: Recipe

    @staticmethod
    def __new__(
        cls: type[UnbuiltWeight],
        recipe: Recipe,
        *,
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> UnbuiltWeight:
        """Make one of a dtype of its own."""
        place = recipe.place
        weight = torch.Tensor._make_wrapper_subclass(
            cls,
            place.size,
            strides=place.stride,
            dtype=dtype,
            device=torch.device("cpu"),
            requires_grad=requires_grad,
        )
        weight.recipe = recipe
        return weight

    def build(self) -> torch.Tensor:
        """Its elements, in memory of their own."""
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
    ) -> torch.Tensor:
        """Answer what asks for no elements, and refuse the rest."""
        weight = args[0] if args else None
        if isinstance(weight, UnbuiltWeight):
            if func in _RENAMING:
                return UnbuiltWeight(weight.recipe, dtype=weight.dtype)
            if func is _aten._to_copy.default and _only_casts(kwargs or {}):
                return UnbuiltWeight(weight.recipe, dtype=kwargs["dtype"])
        shapes = [list(item.shape) for item in args if isinstance(item, UnbuiltWeight)]
        raise UnsupportedError(
            f"{func} wants the elements of a weight of shape {shapes[0] if shapes else '?'}, which "
            "was built inside forebay.zero.Init and has no memory before forebay.initialize",
            hint="change it inside Init, or inside forebay.zero.GatheredParameters(weight), which "
            "gives it memory",
        )


def _only_casts(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    others = {name for name, value in kwargs.items() if value not in (None, False)}
    on_host = device is None or torch.device(device).type == "cpu"
    return kwargs.get("dtype") is not None and on_host and others <= {"dtype", "device"}


def build_in_place(param: torch.Tensor) -> None:
    """Give an unbuilt parameter its elements; it stays the same object."""
    assert isinstance(param, UnbuiltWeight)
    built = nn.Parameter(param.build(), requires_grad=param.requires_grad)
    torch.utils.swap_tensors(param, built)
