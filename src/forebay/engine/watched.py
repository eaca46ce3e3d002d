"""`module._parameters` that tells when a weight is read through its module.

`module.weight` looks the name up here. A weight that is not on the device is brought up before it
is handed out, so that code outside its own module's forward reads the weight and not NaN.
Iterating (`parameters()`, `state_dict()`) tells nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from contextlib import AbstractContextManager

    from torch import nn

__all__ = ["WatchedParameters"]


class WatchedParameters(dict[str, "nn.Parameter | None"]):
    """A module's parameters by name.

    Args:
        members: What was in the module.
        on_read: Called with a parameter before it is handed out.
        showing: Keeps a parameter on the device inside a `with` block; then all ranks take over
            what one of them wrote, where it is given.
        held: `id`s of the parameters that come and go in an open engine.
    """

    def __init__(
        self,
        members: dict[str, nn.Parameter | None],
        on_read: Callable[[nn.Parameter], None],
        showing: Callable[[nn.Parameter, int | None], AbstractContextManager[None]],
        *,
        held: Container[int] = (),
    ) -> None:
        super().__init__(members)
        self._on_read = on_read
        self.showing = showing
        self.held = held

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None:
            self._on_read(param)
        return param

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        import copy

        return copy.deepcopy(dict(self.items()), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)
