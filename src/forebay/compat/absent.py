"""Classes and functions of DeepSpeed that forebay has not: imported freely, refused when used.

Scripts import more than they use, and `from module import name` hides what a module says of a name
that is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

from forebay.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPULion",
    "FusedLamb",
    "FusedLion",
    "OnDevice",
    "TiledLinear",
    "ZenFlowCPUAdam",
    "ZenFlowSelectiveAdamW",
    "ZenFlowSelectiveAdamW_stage3",
    "safe_update_full_grad_vectorized",
]

_ADAM: Final = "use torch.optim.AdamW, or forebay.ops.adam.DeepSpeedCPUAdam"
_ZENFLOW: Final = 'write "zenflow": {} in zero_optimization, beside torch.optim.AdamW'


def _class(name: str, *, instead: str) -> type[Any]:
    """A class that cannot be made, and of which nothing is an instance."""

    def refuse(_self: object, *_args: object, **_kwargs: object) -> NoReturn:
        raise UnsupportedError(f"{name} is not supported", hint=instead)

    return type(name, (), {"__init__": refuse, "__doc__": f"Not supported: {instead}."})


def _function(name: str, *, instead: str) -> Callable[..., Any]:
    """A function that raises when it is called."""

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise UnsupportedError(f"{name} is not supported", hint=instead)

    refuse.__name__, refuse.__doc__ = name, f"Not supported: {instead}."
    return refuse


DeepSpeedCPUAdagrad = _class("DeepSpeedCPUAdagrad", instead=_ADAM)
DeepSpeedCPULion = _class("DeepSpeedCPULion", instead=_ADAM)
FusedLamb = _class("FusedLamb", instead=_ADAM)
FusedLion = _class("FusedLion", instead=_ADAM)
ZenFlowCPUAdam = _class("ZenFlowCPUAdam", instead=_ZENFLOW)
ZenFlowSelectiveAdamW = _class("ZenFlowSelectiveAdamW", instead=_ZENFLOW)
ZenFlowSelectiveAdamW_stage3 = _class("ZenFlowSelectiveAdamW_stage3", instead=_ZENFLOW)
OnDevice = _class(
    "OnDevice",
    instead='build under torch.device("meta"), or with forebay.zero.Init, which keeps values',
)
TiledLinear = _class(
    "TiledLinear",
    instead="use nn.Linear; zero_optimization.sub_group_size and stage3_max_live_parameters bound "
    "what of the weights is on the device",
)
safe_update_full_grad_vectorized = _function(
    "safe_update_full_grad_vectorized",
    instead="call safe_get_full_grad and safe_set_full_grad for each parameter",
)
