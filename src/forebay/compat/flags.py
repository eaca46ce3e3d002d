"""Arguments that are True or False: text such as "false" counts as true in an `if`."""

from __future__ import annotations

from forebay.errors import ConfigError

__all__ = ["check_flags"]


def check_flags(call: str, **given: object) -> None:
    """Refuse what is neither True nor False, before anything is done.

    Args:
        call: The function's name, for the message.
        given: Its flags by their names.

    Raises:
        ConfigError: One is something else.

    Example:
        >>> check_flags("offload_states", pin_memory=True, non_blocking=False)
    """
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ConfigError(
                f"{call}({name}={value!r}): it must be True or False",
                hint=f"a value of type {type(value).__name__} is not read as one: say which",
            )
