"""Bytes and seconds as people write them: "24GiB", "250ms".

Parsing is strict: a number, a unit from the table, nothing else. It is *not* a general quantity
library: two dimensions, no arithmetic.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from forebay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "budget_text",
    "counted",
    "format_bytes",
    "format_seconds",
    "listed",
    "parse_bytes",
    "parse_seconds",
]

_BYTE_UNITS: Final = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
}
_SECOND_UNITS: Final = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)", re.ASCII)
# Addresses have at most 57 bits on today's machines; more than 2**63 - 1 bytes is a typing error.
_MAX_BYTES: Final = 2**63 - 1


def parse_bytes(text: str | int) -> int:
    """Read a size: "24GiB", "1.5 GB", "512B", or a whole number of bytes.

    Args:
        text: The size. A fraction of a byte is rounded down.

    Returns:
        The number of bytes, from 0 to 2**63 - 1.

    Raises:
        ConfigError: For anything else, with what would have been understood.

    Example:
        >>> parse_bytes("24GiB")
        25769803776
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    elif isinstance(text, str):
        number, unit = _split(text, what="size", example="24GiB", units=tuple(_BYTE_UNITS))
        size = int(number * _BYTE_UNITS[unit])
    else:
        raise ConfigError(
            f"{text!r} is not a size: neither text nor a whole number of bytes",
            hint='write for example "24GiB"',
        )
    if not 0 <= size <= _MAX_BYTES:
        raise ConfigError(
            f"{text!r} is not a size: {size} is not between 0 and {_MAX_BYTES} bytes",
            hint='write for example "24GiB"',
        )
    return size


def format_bytes(num_bytes: int) -> str:
    """Write a size for people, in binary units with one decimal.

    Example:
        >>> format_bytes(25769803776), format_bytes(512)
        ('24.0 GiB', '512 B')
    """
    if abs(num_bytes) < 1024:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        # 1023.95 would be printed as 1024.0: go on to the next unit instead.
        if abs(size) < 1023.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} PiB"


def budget_text(num_bytes: int) -> str:
    """The smallest whole number of a unit that holds a size, as a configuration spells it.

    Example:
        >>> budget_text(25769803777), budget_text(512)
        ('25GiB', '512B')
    """
    for name, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{-(-num_bytes // size)}{name}"
    return f"{num_bytes}B"


def parse_seconds(text: str | float) -> float:
    """Read a duration: "250ms", "1.5 s", "2min", or a number of seconds.

    Raises:
        ConfigError: For anything else, negative and non-finite numbers included.

    Example:
        >>> parse_seconds("250ms")
        0.25
    """
    if isinstance(text, str):
        number, unit = _split(text, what="duration", example="30s", units=tuple(_SECOND_UNITS))
        return float(number * _SECOND_UNITS[unit])
    if isinstance(text, bool) or not math.isfinite(text) or text < 0:
        raise ConfigError(f"{text!r} is not a duration", hint='write for example "30s"')
    return float(text)


def counted(number: int, noun: str, *, plural: str | None = None) -> str:
    """A number with what it counts.

    Example:
        >>> counted(1, "update"), counted(12, "update"), counted(2, "entry", plural="entries")
        ('1 update', '12 updates', '2 entries')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def listed(words: Sequence[str]) -> str:
    """Write several things in one sentence.

    Example:
        >>> listed(["one", "two", "three"])
        'one, two and three'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def format_seconds(seconds: float) -> str:
    """Write a duration for people, with two to four significant figures.

    Example:
        >>> format_seconds(0.25), format_seconds(5025)
        ('250.0 ms', '1h 23min 45s')
    """
    for limit, scale, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        # The last printed digit must not round up to the next unit ("1000.0 ms").
        if 0 < seconds < limit * 0.99995:
            return f"{seconds * scale:.1f} {unit}"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}min {rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes}min {rest}s"


def _split(text: str, *, what: str, example: str, units: tuple[str, ...]) -> tuple[Decimal, str]:
    match = _QUANTITY.fullmatch(text)
    hint = f'write a number and one of {", ".join(units)}, for example "{example}"'
    if match is None:
        raise ConfigError(f'"{text}" is not a {what}', hint=hint)
    number, unit = match.groups()
    if unit not in units:
        raise ConfigError(f'"{text}" is not a {what}: {unit} is not a unit', hint=hint)
    return Decimal(number), unit
