"""What an engine refuses to train, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.engine.collector import hook_of
from forebay.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from torch import nn

__all__ = ["compiled_error", "refuse_compiled", "refuse_strangers", "refuse_taken"]


def refuse_taken(params: Iterable[nn.Parameter]) -> None:
    """Refuse parameters that another open engine trains."""
    if any(hook_of(param) is not None for param in params):
        raise UnsupportedError(
            "a parameter of the model is trained by another engine that is still open",
            hint="close() that engine (or optimizer) first",
        )


def compiled_error() -> UnsupportedError:
    """The error for compiled modules whose weights live on the host."""
    return UnsupportedError(
        "a module is compiled, and its weights live on the host: no hook inside it can bring them",
        hint="leave torch.compile out, or keep parameters on the device",
    )


def refuse_compiled(root: nn.Module) -> None:
    """Refuse a model with compiled modules, where weights live on the host."""
    for module in root.modules():
        is_wrapper = type(module).__name__ == "OptimizedModule"
        if is_wrapper or getattr(module, "_compiled_call_impl", None) is not None:
            raise compiled_error()


def refuse_strangers(groups: Sequence[dict[str, Any]], *, known: Container[int]) -> None:
    """Refuse parameters with a gradient that were not trained when forebay took over.

    Args:
        groups: The optimizer's groups.
        known: `id`s of the parameters that are trained.
    """
    for index, group in enumerate(groups):
        for param in group["params"]:
            if param.grad is not None and id(param) not in known:
                raise UnsupportedError(
                    f"a parameter of group {index} with shape {tuple(param.shape)} has a "
                    "gradient, but was frozen (or not in its group) when forebay took over",
                    hint="build a new engine after changing what is trained",
                )
