"""Sizes and durations: what is understood, what is not, and how they are printed."""

from __future__ import annotations

import pytest

from forebay.errors import ConfigError
from forebay.units_of_measure import (
    counted,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GiB", 24 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("0.1KiB", 102),
        ("1GB", 10**9),
        ("2kB", 2000),
        ("2KB", 2000),
        ("7B", 7),
        ("0B", 0),
        (0, 0),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_parse_bytes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "24", "24G", "24gib", "24Gib", "-1GiB", "1e3MiB", "1.GiB", ".5GiB", "nanGiB"),
        *("24  GiB", " 24GiB", "24GiB ", "1,5GiB", "٢GiB", "24GiB\n", "1.0x", "9999999PiB"),
        *(-1, 2**63, True, 1.5, None, float("nan")),
    ],
)
def test_parse_bytes_refuses(text: object) -> None:
    with pytest.raises(ConfigError, match="is not a size") as caught:
        parse_bytes(text)  # type: ignore[arg-type]
    assert "24GiB" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (24 * 2**30, "24.0 GiB"),
        (3 * 2**39, "1.5 TiB"),
        (2**60, "1024.0 PiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("1.5 s", 1.5), ("2min", 120.0), ("3h", 10800.0), ("10us", 1e-5), (2, 2.0)],
)
def test_parse_seconds(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "5 minutes", "-1s", float("nan"), float("inf"), -1, True]
)
def test_parse_seconds_refuses(text: str | float) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (2.5e-7, "250.0 ns"),
        (1e-5, "10.0 us"),
        (0.25, "250.0 ms"),
        (0.9999999, "1.00 s"),
        (59.994, "59.99 s"),
        (59.999, "1min 0s"),
        (3599.9, "1h 0min 0s"),
        (5025, "1h 23min 45s"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_counted() -> None:
    assert [counted(number, "update") for number in (0, 1, 2)] == [
        "0 updates",
        "1 update",
        "2 updates",
    ]
    assert counted(3, "entry", plural="entries") == "3 entries"
