"""What an engine refuses to train, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.engine.collector import hook_of
from forebay.engine.watched import WatchedParameters
from forebay.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from torch import nn

__all__ = ["compiled_error", "refuse_strangers", "refuse_taken"]


def refuse_taken(model: nn.Module, params: Iterable[nn.Parameter]) -> None:
    """Refuse parameters that another open engine trains, or that come and go in it.

    Args:
        model: The model; its modules tell what comes and goes.
        params: What is to be taken over.

    Raises:
        UnsupportedError: One of them is held.
    """
    watched = [
        module._parameters.held
        for module in model.modules()
        if isinstance(module._parameters, WatchedParameters)
    ]
    for param in params:
        if hook_of(param) is not None or any(id(param) in held for held in watched):
            name = next((name for name, one in model.named_parameters() if one is param), None)
            which = "a parameter outside of the model" if name is None else f"parameter {name}"
            raise UnsupportedError(
                f"{which} is held by another engine that is still open",
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
