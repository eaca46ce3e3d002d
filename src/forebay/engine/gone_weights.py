"""What a closed engine leaves where weights were spread over ranks: nobody has them whole.

Parameters view NaN then. Who reads one through its module, or its state dict, is told so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.engine.watched import WatchedParameters
from forebay.errors import EngineClosedError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["are_gone", "leave_gone"]


def leave_gone(module: nn.Module) -> None:
    """Let reads of a module's own weights raise EngineClosedError, for good."""
    module._parameters = WatchedParameters(dict(module._parameters.items()), _refuse)
    module.register_state_dict_pre_hook(_refuse)


def are_gone(param: nn.Parameter) -> bool:
    """Whether a parameter has no values of its own: each element is the same NaN."""
    spread = param.numel() > 1 and not any(param.stride())
    return spread and bool(param.detach().reshape(-1)[0].isnan())


def _refuse(*_: Any) -> None:
    raise EngineClosedError(
        "weights were spread over ranks (stage 3) and went with their engine when it was closed",
        hint="call engine.state_dict() on every rank before close(), or save a checkpoint; load it "
        "into a newly built model",
    )
