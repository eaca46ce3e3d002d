"""Compiled modules of a model: no hook inside them runs, so what they need is seen to outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = ["compiled_modules", "is_wrapper"]


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is what `torch.compile` returns; its own hooks run outside."""
    return type(module).__name__ == "OptimizedModule"


def compiled_modules(root: nn.Module) -> Iterator[nn.Module]:
    """Outermost compiled modules below the root: wrappers, and modules compiled in place."""
    for child in root.children():
        if is_wrapper(child) or getattr(child, "_compiled_call_impl", None) is not None:
            yield child
        else:
            yield from compiled_modules(child)
