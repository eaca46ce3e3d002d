"""The stack of blocks of a model: the container whose elements run one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["find_stack"]

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def find_stack(root: nn.Module) -> tuple[nn.Module, ...]:
    """The blocks of the outermost container with the most parameters, in their order.

    Returns:
        Its elements that have parameters; empty where no container has two of those.
    """
    return max(_stacks(root), key=_elements, default=())


def _stacks(module: nn.Module) -> Iterator[tuple[nn.Module, ...]]:
    blocks = tuple(
        {id(child): child for child in module.children() if _elements((child,))}.values()
    )
    if isinstance(module, _CONTAINERS) and len(blocks) > 1:
        yield blocks
        return
    for child in module.children():
        yield from _stacks(child)


def _elements(blocks: tuple[nn.Module, ...]) -> int:
    params = {id(param): param for block in blocks for param in block.parameters()}
    return sum(param.numel() for param in params.values())
