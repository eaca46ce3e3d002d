"""Types of configuration values: what a key accepts, as a check and as words for the docs.

A check takes the value that JSON gave and returns the value that forebay uses, or raises
`ValueError` with what was expected ("an integer >= 0"). It does *not* know keys: see
`forebay.config.keys`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from forebay.errors import ConfigError
from forebay.units_of_measure import parse_bytes

__all__ = [
    "ANYTHING",
    "BETAS",
    "COUNT",
    "ELEMENTS",
    "FLAG",
    "FOLDERS",
    "INTEGER",
    "INTERVAL",
    "NON_NEGATIVE",
    "NUMBER",
    "NUMBERS",
    "PART",
    "POSITIVE",
    "POSITIVE_NUMBER",
    "RATES",
    "SECTORS",
    "SHARE",
    "SIZE",
    "STATE_ELEMENTS",
    "TEXT",
    "TEXTS",
    "ElementsOf",
    "Kind",
    "bounded_integer",
    "choice",
    "optional",
    "or_auto",
]

# Counts beyond this are typing errors. DeepSpeed's own defaults reach sys.maxsize.
_MAX_COUNT: Final = 2**63 - 1


class ElementsOf(Enum):
    """What a number of elements counts, so that bytes are printed beside it."""

    WEIGHTS = "weights"
    """Elements of the working dtype."""
    STATE = "state"
    """An fp32 master and two moments each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A type of value.

    Attributes:
        name: What is accepted, in words that complete "must be ...".
        check: The value to use, or `ValueError` (its text is not shown).
        elements_of: What the number counts elements of; None where it counts none.
    """

    name: str
    check: Callable[[object], object]
    elements_of: ElementsOf | None = None


def _number(value: object) -> float:
    # bool is an int to Python and not a number to anyone else.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("not a number")  # noqa: TRY004
    # Also false for NaN, and right for integers that no float holds.
    if not abs(value) <= sys.float_info.max:
        raise ValueError("not finite")
    return value


def _integer(value: object) -> int:
    number = _number(value)
    # JSON has no integers in scientific notation: 5e8 arrives as a float.
    if number != int(number):
        raise ValueError("not whole")
    return int(number)


def _bounded(read: Callable[[object], float], low: float, high: float) -> Callable[[object], float]:
    def check(value: object) -> float:
        number = read(value)
        if not low <= number <= high:
            raise ValueError("out of range")
        return number

    return check


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("not a boolean")  # noqa: TRY004
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not text")  # noqa: TRY004
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("not a list")  # noqa: TRY004
    return tuple(_text(item) for item in value)


def _positive_number(value: object) -> float:
    number = float(_number(value))
    if number <= 0:
        raise ValueError("not positive")
    return number


def _part(value: object) -> float:
    number = float(_number(value))
    if not 0 < number < 1:
        raise ValueError("not a part")
    return number


def _rate(value: object) -> float:
    number = float(_number(value))
    if number < 0:
        raise ValueError("negative")
    return number


def _rates(value: object) -> float | tuple[float, ...]:
    if isinstance(value, list | tuple):
        if not value:
            raise ValueError("empty")
        return tuple(_rate(item) for item in value)
    return _rate(value)


def _betas(value: object) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("not a pair")
    first, second = (float(_number(item)) for item in value)
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ValueError("out of range")
    return first, second


def _size(value: object) -> int:
    if not isinstance(value, str | int):
        raise ValueError("not a size")  # noqa: TRY004
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ValueError(error.message) from error


def _interval(value: object) -> int | None:
    # accelerate writes infinity for "never".
    if value is None or value == math.inf:
        return None
    return int(_bounded(_integer, 1, _MAX_COUNT)(value))


def _folders(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str):
        if not value:
            raise ValueError("empty")
        return value
    folders = _texts(value)
    if not all(folders) or not folders:
        raise ValueError("empty")
    return folders


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("not a list")  # noqa: TRY004
    found = tuple(int(_bounded(_integer, 0, _MAX_COUNT)(item)) for item in value)
    if len(set(found)) < len(found):
        raise ValueError("twice the same")
    return tuple(sorted(found))


def _sectors(value: object) -> int:
    number = int(_bounded(_integer, 4096, 1 << 30)(value))
    if number % 4096:
        raise ValueError("not a multiple of 4096")
    return number


def choice(*values: str | int) -> Kind:
    """One of the values, exactly as written."""

    def check(value: object) -> object:
        for known in values:
            # 1 == True == 1.0 in Python; a stage may be 1 or 1.0 and not true.
            if value == known and isinstance(value, bool) == isinstance(known, bool):
                return known
        raise ValueError("not among the choices")

    words = [f'"{value}"' if isinstance(value, str) else str(value) for value in values]
    return Kind(
        name=" or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words),
        check=check,
    )


def bounded_integer(low: int, high: int) -> Callable[[object], float]:
    """The check of a whole number in a range."""
    return _bounded(_integer, low, high)


def optional(kind: Kind) -> Kind:
    """The kind, or null."""
    return Kind(
        name=f"{kind.name} or null",
        check=lambda value: None if value is None else kind.check(value),
        elements_of=kind.elements_of,
    )


def or_auto(kind: Kind) -> Kind:
    """The kind, or the text "auto"."""
    return Kind(
        name=f'{kind.name} or "auto"',
        check=lambda value: value if value == "auto" else kind.check(value),
    )


ANYTHING: Final = Kind(name="any value", check=lambda value: value)
FLAG: Final = Kind(name="true or false", check=_flag)
INTEGER: Final = Kind(name="an integer", check=_bounded(_integer, -_MAX_COUNT, _MAX_COUNT))
COUNT: Final = Kind(name="an integer >= 0", check=_bounded(_integer, 0, _MAX_COUNT))
POSITIVE: Final = Kind(name="an integer >= 1", check=_bounded(_integer, 1, _MAX_COUNT))
ELEMENTS: Final = Kind(
    name="a number of elements >= 0", check=COUNT.check, elements_of=ElementsOf.WEIGHTS
)
STATE_ELEMENTS: Final = Kind(name=ELEMENTS.name, check=COUNT.check, elements_of=ElementsOf.STATE)
NUMBER: Final = Kind(name="a number", check=_number)
NON_NEGATIVE: Final = Kind(name="a number >= 0", check=_rate)
POSITIVE_NUMBER: Final = Kind(name="a number > 0", check=_positive_number)
RATES: Final = Kind(name="a number >= 0, or one for each parameter group", check=_rates)
PART: Final = Kind(name="a number > 0 and < 1", check=_part)
SHARE: Final = Kind(name="a number from 0 to 1", check=_bounded(_number, 0.0, 1.0))
TEXT: Final = Kind(name="text", check=_text)
TEXTS: Final = Kind(name="a list of texts", check=_texts)
BETAS: Final = Kind(name="two numbers >= 0 and < 1", check=_betas)
SIZE: Final = Kind(name='a size such as "24GiB", or a number of bytes', check=_size)
FOLDERS: Final = Kind(name="text, or a list of texts", check=_folders)
NUMBERS: Final = Kind(name="a list of different integers >= 0", check=_numbers)
SECTORS: Final = Kind(
    name="an integer >= 4096 and a multiple of it, at most 1073741824", check=_sectors
)
INTERVAL: Final = Kind(name="an integer >= 1 or null", check=_interval)
