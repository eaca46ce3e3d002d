"""Which units a model's modules hold while they compute, and what that takes at once.

A module holds the units of its own parameters, and those that it is the smallest module around,
until its forward ends; so do all the modules around it. A compiled one holds all units inside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from forebay.model.compiled import compiled_modules
from forebay.model.tree import smallest_around

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

__all__ = ["MostHeld", "held_by_modules", "most_held"]


class MostHeld(NamedTuple):
    """The largest sum of units that are held at the same time."""

    nbytes: int
    units: tuple[int, ...]


def held_by_modules(
    root: nn.Module, *, owners: Mapping[int, Sequence[Sequence[nn.Module]]]
) -> dict[int, tuple[int, ...]]:
    """For the `id` of each module, the units that it holds.

    Args:
        root: The model.
        owners: For each unit, the modules that own each of its parameters.
    """
    held: dict[int, tuple[int, ...]] = {}
    for unit, params in owners.items():
        modules = [owner for param in params for owner in param]
        around = smallest_around(root, [param[0] for param in params if param])
        if around is not None and around is not root:
            modules.append(around)
        for module in modules:
            known = held.get(id(module), ())
            if unit not in known:
                held[id(module)] = (*known, unit)
    for outside in compiled_modules(root):
        inside = [unit for module in outside.modules() for unit in held.get(id(module), ())]
        held[id(outside)] = tuple(dict.fromkeys(inside))
    return held


def most_held(
    root: nn.Module, *, held: Mapping[int, tuple[int, ...]], sizes: Mapping[int, int]
) -> MostHeld:
    """What a forward holds at the most, as modules lie inside one another.

    Args:
        root: The model.
        held: See `held_by_modules`.
        sizes: Bytes of each unit that takes any.
    """
    most = MostHeld(0, ())

    def _walk(module: nn.Module, outside: tuple[int, ...]) -> None:
        nonlocal most
        here = [u for u in held.get(id(module), ()) if u in sizes and u not in outside]
        inside = (*outside, *here)
        if here:
            nbytes = sum(sizes[unit] for unit in inside)
            most = max(most, MostHeld(nbytes, inside))
        for child in module.children():
            _walk(child, inside)

    _walk(root, ())
    # A unit of parameters that no module of the model owns is used by itself.
    for unit, nbytes in sizes.items():
        most = max(most, MostHeld(nbytes, (unit,)))
    return most
