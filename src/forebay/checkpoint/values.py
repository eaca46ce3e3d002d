"""Plain values as JSON and back, without loss and without surprises.

JSON has no tuples, no infinities and no keys but strings. What it lacks is written as an object
with one key that starts with "$"; everything else that is not plain is refused by its path.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

from forebay.errors import CheckpointError

__all__ = ["decode", "encode", "is_unicode", "parse_json"]

_FLOAT: Final = "$float"
_TUPLE: Final = "$tuple"
_DEPTH: Final = 64
# Python reads no longer number from text; 4,300 digits.
_INT_BITS: Final = 14_000


def encode(value: Any, *, where: str, depth: int = 0) -> Any:
    """A value as JSON holds it.

    Args:
        value: None, bool, int, float, str, and lists, tuples and dicts (with text keys) of them.
        where: What it is, for messages: "client_state".
        depth: How deep it lies; callers leave it out.

    Raises:
        CheckpointError: Something inside is of another type; names where it is.
    """
    kind = type(value)
    if depth > _DEPTH:
        raise CheckpointError(f"{where} is nested more than {_DEPTH} deep")
    if kind is str and not is_unicode(value):
        raise CheckpointError(f"{where} is {value[:40]!r}, which is no valid Unicode")
    if kind is int and value.bit_length() > _INT_BITS:
        raise CheckpointError(
            f"{where} has {value.bit_length()} bits; at most {_INT_BITS} are held",
            hint="save it as text",
        )
    if value is None or kind in {bool, int, str}:
        return value
    if kind is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if kind in {list, tuple}:
        items = [
            encode(item, where=f"{where}[{index}]", depth=depth + 1)
            for index, item in enumerate(value)
        ]
        return items if kind is list else {_TUPLE: items}
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str or key.startswith("$") or not is_unicode(key):
                raise CheckpointError(
                    f"{where} has the key {key!r}; keys are text that does not start with $",
                    hint="write str(key)",
                )
        return {
            key: encode(item, where=f"{where}[{key!r}]", depth=depth + 1)
            for key, item in value.items()
        }
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, and a checkpoint holds plain "
        "values: None, bool, int, float, str, list, tuple and dict",
        hint="convert it (float(x), x.tolist(), vars(x)), or save it in a file of its own",
    )


def is_unicode(text: str) -> bool:
    """Whether a text can be written; one with half a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode(value: Any, *, depth: int = 0) -> Any:
    """The value that `encode` was given.

    Raises:
        CheckpointError: It is nothing that `encode` makes.
    """
    # A tuple takes two levels.
    if depth > 2 * _DEPTH + 2:
        raise CheckpointError(f"a value is nested more than {_DEPTH} deep")
    if isinstance(value, list):
        return [decode(item, depth=depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: decode(item, depth=depth + 1) for key, item in value.items()}
    text = value.get(_FLOAT)
    if len(value) == 1 and isinstance(text, str) and text in {"inf", "-inf", "nan"}:
        return float(text)
    items = value.get(_TUPLE)
    if len(value) == 1 and isinstance(items, list):
        return tuple(decode(item, depth=depth + 2) for item in items)
    raise CheckpointError(f"{min(value)[:40]!r} is no value of this format")


def parse_json(data: bytes | bytearray, *, what: str) -> dict[str, Any]:
    """An object from JSON that nobody vouches for.

    Raises:
        CheckpointError: It is no JSON object, names something twice, or is nested too deep.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_twins, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{what} is no valid JSON: {reason[:200]}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is no JSON object")
    return value


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is there twice")
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")
