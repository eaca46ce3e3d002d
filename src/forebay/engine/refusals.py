"""What an engine refuses to train, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.engine.collector import hook_of
from forebay.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from torch import nn

__all__ = ["compiled_error", "refuse_strangers", "refuse_taken"]


def refuse_taken(params: Iterable[nn.Parameter]) -> None:
    """Refuse parameters that another open engine trains."""
    if any(hook_of(param) is not None for param in params):
        raise UnsupportedError(
            "a parameter of the model is trained by another engine that is still open",
            hint="close() that engine (or optimizer) first",
        )


def compiled_error() -> UnsupportedError:
    """The error for modules that are compiled after their weights came to live elsewhere."""
    return UnsupportedError(
        "a module was compiled after forebay took over, and its weights come to the device for "
        "use alone (they are on the host, in files or shared out over ranks): no hook inside can "
        "bring them",
        hint="compile the model's blocks before initialize()/offload(), or keep parameters on the "
        "device: without offload_param, and over ranks in stage 2",
    )


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
