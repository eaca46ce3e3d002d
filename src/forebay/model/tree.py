"""Questions about a module tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

__all__ = ["smallest_around"]


def smallest_around(root: nn.Module, modules: Iterable[nn.Module]) -> nn.Module | None:
    """The smallest module of a tree that holds all of `modules`; None for none."""
    wanted = {id(module) for module in modules}
    if not wanted:
        return None
    around = root
    while True:
        for child in around.children():
            if wanted <= {id(module) for module in child.modules()}:
                around = child
                break
        else:
            return around
