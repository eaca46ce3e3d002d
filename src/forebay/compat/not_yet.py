"""Methods of DeepSpeed's engine that forebay's has not yet: refused by name, when called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from forebay.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NOT_YET", "refusal"]

_COMPILE = "compile the model's blocks with torch.compile before initialize"
_MICRO_STEPS = "call engine(batch), engine.backward(loss) and engine.step() for each micro-batch"
# Method to what to do instead.
NOT_YET: Final = {
    "compile": _COMPILE,
    "eval_batch": _MICRO_STEPS,
    "get_wall_clock_timers": "measure with torch.profiler",
    "register_compile_pass": _COMPILE,
}


def refusal(name: str) -> Callable[..., Any]:
    """What stands in for a method, so that `hasattr` answers as a script expects."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise UnsupportedError(f"engine.{name}() is not supported yet", hint=NOT_YET[name])

    return refuse
