"""A hook on a module that stays behind when the module is copied or pickled.

[Note: copies of a model] `copy.deepcopy(model)` copies a module's parameters, then its hooks,
then its children. A plain hook would take the engine along, or go on waiting for the original's
units. This one leaves an inert function in the copy, and passes the barrier first: parameters
that were copied while their weights were on their way get the new ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ModuleHook"]


class ModuleHook:
    """One hook of one engine.

    Args:
        call: What it does.
        before_copy: Called before the module's children are copied, with the memo of
            `copy.deepcopy`; with None before it is pickled.
    """

    def __init__(
        self, call: Callable[..., Any], *, before_copy: Callable[[dict[int, Any] | None], None]
    ) -> None:
        self._call = call
        self._before_copy = before_copy

    def __call__(self, *args: Any) -> Any:
        """Do what the hook does."""
        return self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        self._before_copy(memo)
        return _inert

    def __reduce__(self) -> tuple[Any, ...]:
        self._before_copy(None)
        return _inert_hook, ()


def _inert(*_args: Any) -> None:
    """What a hook is in a copy."""


def _inert_hook() -> Callable[..., None]:
    return _inert
