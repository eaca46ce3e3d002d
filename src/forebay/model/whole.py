"""Marks on modules whose parameters stay in one unit, however units are formed otherwise.

A mark is one of the module's own hooks (torch's registry for what follows `load_state_dict`, so
that a forward pays nothing): it goes where the module goes, into copies and pickles too, and
there is no table of modules to keep beside the model. It is not a placement; it only tells
`forebay.model.inspect` what not to cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["is_whole", "mark_whole", "unmark_whole", "whole_modules"]


class _Whole:
    """The mark. As a hook it does nothing."""

    def __call__(self, *_args: object) -> None:
        return None


def mark_whole(module: nn.Module) -> None:
    """Ask that a module's parameters lie in one unit; read when forebay takes the model over."""
    if not is_whole(module):
        module.register_load_state_dict_post_hook(_Whole())


def unmark_whole(module: nn.Module) -> None:
    """Take the mark away."""
    hooks = module._load_state_dict_post_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _Whole)]:
        del hooks[key]


def is_whole(module: nn.Module) -> bool:
    """Whether the module itself is marked."""
    return any(isinstance(hook, _Whole) for hook in module._load_state_dict_post_hooks.values())


def whole_modules(root: nn.Module) -> list[nn.Module]:
    """The marked modules of a tree, outer ones before those inside them."""
    return [module for module in root.modules() if is_whole(module)]
