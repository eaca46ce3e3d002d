"""Warnings raised from our own modules fail the tests that provoke them."""

from __future__ import annotations

import warnings

import pytest


def test_our_warnings_are_errors() -> None:
    """The filter of pyproject.toml covers every module below forebay."""
    with pytest.raises(DeprecationWarning):
        warnings.warn_explicit(
            "old", DeprecationWarning, filename="x.py", lineno=1, module="forebay.engine.step"
        )


def test_warnings_of_others_are_not() -> None:
    """A dependency may deprecate what it likes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn_explicit(
            "old", DeprecationWarning, filename="x.py", lineno=1, module="elsewhere"
        )
    assert len(caught) == 1
