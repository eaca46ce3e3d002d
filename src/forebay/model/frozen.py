"""Units of a model's frozen parameters, for weights that come and go though nothing trains them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from forebay.model.inspect import DTYPES, names_and_owners
from forebay.model.spec import ModelSpec, ParamSpec, UnitSpec
from forebay.model.unbuilt import UnbuiltWeight
from forebay.model.units import units_by_blocks, units_by_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from forebay.model.inspect import InspectedModel

__all__ = ["with_frozen"]


def with_frozen(
    inspected: InspectedModel,
    model: nn.Module,
    *,
    unit_elements: int | None,
    cast_to: torch.dtype | None,
) -> InspectedModel:
    """The same with units of frozen parameters behind those that are trained.

    Parameters of other dtypes than weights have, or of a tensor type of their own (quantized ones),
    are left out, and those that need a gradient but are in no group.

    Args:
        inspected: The trained parameters.
        model: The model.
        unit_elements: Elements per unit; None lets units follow the module tree.
        cast_to: What float32 parameters will become; None leaves them.
    """
    trained = {id(param) for param in inspected.params}
    frozen = {
        id(param)
        for param in model.parameters()
        if id(param) not in trained and not param.requires_grad and _comes_and_goes(param)
    }
    if unit_elements is None:
        units = units_by_blocks(model, trained=frozen)
    else:
        units = units_by_size(model, trained=frozen, unit_elements=unit_elements)
    names, owners = names_and_owners(model)
    params = list(inspected.params)
    specs = []
    for unit in units:
        members = []
        for param in unit.params:
            cast = cast_to is not None and param.dtype is torch.float32
            dtype = cast_to if cast and cast_to is not None else param.dtype
            members.append(
                ParamSpec(
                    index=len(params),
                    names=tuple(names[id(param)]),
                    shape=tuple(param.shape),
                    dtype=DTYPES[dtype],
                    group=-1,
                )
            )
            params.append(param)
        specs.append(UnitSpec(name=f"{unit.name} (frozen)", params=tuple(members)))
    new = params[len(inspected.params) :]
    return replace(
        inspected,
        frozen=ModelSpec(units=tuple(specs)),
        params=tuple(params),
        owners=(*inspected.owners, *(tuple(owners[id(param)]) for param in new)),
        order=_module_order([*inspected.spec.units, *specs], params=params, names=names),
    )


def _module_order(
    units: Sequence[UnitSpec], *, params: Sequence[nn.Parameter], names: Iterable[int]
) -> tuple[int, ...]:
    """Units by where the first of their parameters stands in the module tree."""
    places = {key: place for place, key in enumerate(names)}
    first = [
        min(places.get(id(params[param.index]), len(places)) for param in unit.params)
        for unit in units
    ]
    return tuple(sorted(range(len(units)), key=lambda index: (first[index], index)))


def _comes_and_goes(param: nn.Parameter) -> bool:
    is_plain = type(param.data) in (torch.Tensor, UnbuiltWeight)
    return param.dtype in DTYPES and is_plain and param.is_floating_point()
