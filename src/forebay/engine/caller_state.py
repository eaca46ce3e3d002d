"""What torch keeps for each thread, as it is in one thread, entered in another one.

A new thread has none of it: it computes with OpenMP's default number of threads, and sums of other
parts give other bits; it records a graph under the caller's `no_grad`; it knows neither autocast
nor stream, default device, modes and saved-tensor hooks of the caller. What torch keeps for the
process (default dtype, deterministic algorithms, random generators, warnings) is not here.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from forebay.accelerators.base import Accelerator

__all__ = ["CallerState"]


class CallerState:
    """The calling thread's state, taken when this is made.

    Args:
        accelerator: Whose stream and autocast, beside the CPU's.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._stream = accelerator.calling_stream()
        self._infers = torch.is_inference_mode_enabled()
        self._records = torch.is_grad_enabled()
        self._caches = torch.is_autocast_cache_enabled()
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", accelerator.device.type})
        }
        self._function_modes = _get_current_function_mode_stack()
        self._dispatch_modes = dispatch._get_current_dispatch_mode_stack()
        self._device_mode = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        self._saving = _saving_hooks()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside it, the calling thread computes as the other one did."""
        # torch gives a thread the number that set_num_threads set when somebody first asks in it;
        # products and convolutions do not ask
        torch.get_num_threads()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._stream())
            stack.enter_context(torch.inference_mode(self._infers))
            stack.enter_context(torch.set_grad_enabled(self._records))
            for kind, (enabled, dtype) in self._autocast.items():
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._caches)
                )
            if self._device_mode is not None:
                torch._GLOBAL_DEVICE_CONTEXT.device_context = self._device_mode
            stack.enter_context(
                _pushed(
                    self._saving,
                    lambda pair: _autograd()._push_saved_tensors_default_hooks(*pair),
                    _autograd()._pop_saved_tensors_default_hooks,
                )
            )
            # not by their `__enter__`: they are entered already, and know how often
            stack.enter_context(
                _pushed(self._dispatch_modes, dispatch._push_mode, dispatch._pop_mode)
            )
            stack.enter_context(_pushed(self._function_modes, _push_mode, _pop_mode))
            yield


def _autograd() -> Any:
    return torch._C._autograd


@contextlib.contextmanager
def _pushed(
    values: Sequence[Any], push: Callable[[Any], Any], pop: Callable[[], Any]
) -> Iterator[None]:
    for value in values:
        push(value)
    try:
        yield
    finally:
        for _ in values:
            pop()


def _saving_hooks() -> list[Any]:
    """The pairs of saved-tensor hooks in force, outermost first; torch shows only the last one."""
    autograd = _autograd()
    found: list[Any] = []
    while (pair := autograd._top_saved_tensors_default_hooks(True)) is not None:  # noqa: FBT003
        found.insert(0, pair)
        autograd._pop_saved_tensors_default_hooks()
    for pair in found:
        autograd._push_saved_tensors_default_hooks(*pair)
    return found
