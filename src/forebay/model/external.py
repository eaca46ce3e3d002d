"""Marks on modules that read parameters of other modules in their forward.

A mark is one of the module's own hooks, as in `forebay.model.whole`: it goes where the module goes,
and in a copy of the model it names the copy's parameter. It only tells the engine what to have
ready when the module is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["external_parameters", "mark_external", "unmark_external"]


class _External:
    """The mark. As a hook it does nothing."""

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param

    def __call__(self, *_args: object) -> None:
        return None


def mark_external(module: nn.Module, param: nn.Parameter) -> None:
    """Declare that a module's forward reads a parameter that it does not own."""
    if all(known is not param for known in external_parameters(module)):
        module.register_load_state_dict_post_hook(_External(param))


def unmark_external(module: nn.Module, param: nn.Parameter) -> None:
    """Take a declaration back."""
    hooks = module._load_state_dict_post_hooks
    found = [
        key for key, hook in hooks.items() if isinstance(hook, _External) and hook.param is param
    ]
    for key in found:
        del hooks[key]


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a module is marked to read."""
    hooks = module._load_state_dict_post_hooks.values()
    return [hook.param for hook in hooks if isinstance(hook, _External)]
