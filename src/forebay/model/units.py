"""Which parameters form a unit: from the module tree, without any list of model classes.

By default each element of a `ModuleList`, `ModuleDict` or `Sequential` met first on the way down
is one unit (a transformer block, with all of its experts), and neighbouring modules outside such
lists share one. With a size asked for, parameters are packed in module order instead. Modules
that must stay whole are never cut, either way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["UnitMembers", "units_by_blocks", "units_by_size"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(slots=True)
class UnitMembers:
    """A unit being put together: its name and its parameters in module order."""

    name: str
    params: list[nn.Parameter] = field(default_factory=list)


def _is_block_list(module: nn.Module) -> bool:
    with_params = sum(1 for child in module.children() if any(True for _ in child.parameters()))
    return isinstance(module, _CONTAINERS) and with_params > 1


def _walk(
    module: nn.Module, name: str, whole: set[int]
) -> Iterator[tuple[str, list[nn.Parameter], bool]]:
    """Yield (name, parameters, is_block) in module order."""
    if id(module) in whole:
        yield name or "root", list(module.parameters()), True
        return
    own = list(module.parameters(recurse=False))
    if own:
        yield name, own, False
    block_list = _is_block_list(module)
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if block_list:
            yield full, list(child.parameters()), True
        else:
            yield from _walk(child, full, whole)


def units_by_blocks(
    model: nn.Module, *, trained: set[int], whole: Sequence[nn.Module] = ()
) -> list[UnitMembers]:
    """Units that follow the module tree.

    Args:
        model: The model.
        trained: `id`s of the parameters that are trained; others are left out.
        whole: Modules that are not cut: one unit each, or part of the block around them.

    Returns:
        Units in module order, each parameter (tied ones too) in the first that owns it.
    """
    seen: set[int] = set()
    units: list[UnitMembers] = []
    run: UnitMembers | None = None
    for name, params, is_block in _walk(model, "", {id(module) for module in whole}):
        fresh = [p for p in params if id(p) in trained and id(p) not in seen]
        seen.update(id(p) for p in fresh)
        if not fresh:
            continue
        if is_block:
            run = None
            units.append(UnitMembers(name, fresh))
        elif run is None:
            run = UnitMembers(name or "root", list(fresh))
            units.append(run)
        else:
            run.params.extend(fresh)
    return units


def units_by_size(
    model: nn.Module, *, trained: set[int], unit_elements: int, whole: Sequence[nn.Module] = ()
) -> list[UnitMembers]:
    """Units of at most `unit_elements` elements, or one parameter where that is larger.

    Args:
        model: The model.
        trained: `id`s of the parameters that are trained.
        unit_elements: Elements per unit; at least 1.
        whole: Modules whose parameters must stay in one unit whatever their size, outer ones
            before those inside them.
    """
    kept: dict[int, int] = {}
    for n, module in enumerate(whole):
        for param in module.parameters():
            kept.setdefault(id(param), n)
    units: list[UnitMembers] = []
    size, current_whole = 0, None
    for name, param in model.named_parameters():
        if id(param) not in trained:
            continue
        group = kept.get(id(param))
        joins = units and (
            group == current_whole
            if group is not None or current_whole is not None
            else size + param.numel() <= unit_elements
        )
        if not joins:
            units.append(UnitMembers(name))
            size = 0
        units[-1].params.append(param)
        size += param.numel()
        current_whole = group
    return units
