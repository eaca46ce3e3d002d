"""A mark on a model that was built on the meta device: where its weights are to come from.

A mark is one of the model's own hooks, as in `forebay.model.whole`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["mark_origin", "origin_of"]


class _Origin:
    """The mark. As a hook it does nothing."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __call__(self, *_args: object) -> None:
        return None


def mark_origin(model: nn.Module, source: Any) -> None:
    """Say where the values of a model's meta parameters come from; the last word counts."""
    hooks = model._load_state_dict_post_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _Origin)]:
        del hooks[key]
    model.register_load_state_dict_post_hook(_Origin(source))


def origin_of(model: nn.Module) -> Any | None:
    """What was said, or None."""
    hooks = model._load_state_dict_post_hooks.values()
    return next((hook.source for hook in hooks if isinstance(hook, _Origin)), None)
