"""What a closed engine leaves where weights were spread over ranks: nobody has them whole.

Parameters view NaN then. Who reads one through its module, or its state dict, is told so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from forebay.engine.watched import WatchedParameters
from forebay.errors import EngineClosedError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["leave_gone"]


def leave_gone(module: nn.Module) -> None:
    """Let reads of a module's own weights raise EngineClosedError, for good."""
    module._parameters = WatchedParameters(
        dict(module._parameters.items()), _refuse, showing=_refuse
    )
    module.register_state_dict_pre_hook(_refuse)


def _refuse(*_: Any) -> NoReturn:
    raise EngineClosedError(
        "weights were spread over ranks (stage 3) and went with their engine when it was closed",
        hint="call engine.state_dict() on every rank before close(), or save a checkpoint; load it "
        "into a newly built model",
    )
