"""The only door to the compiled core, `forebay._core`.

It decides one thing: whether this process computes with the native core or, where that was not
built, with the slow fallback of the same interface and the same bits. It is not a wrapper: what
it returns is the module itself, described in `_core.pyi`.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from typing import TYPE_CHECKING

from forebay.errors import ForebayWarning

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["core"]


@functools.cache
def core() -> ModuleType:
    """The native core, or the fallback with one warning.

    `FOREBAY_KERNEL_LEVEL=fallback` in the environment asks for the fallback; avx512, avx2 and
    baseline choose among the native core's instruction sets.

    Returns:
        A module with the names of `_core.pyi`.
    """
    if os.environ.get("FOREBAY_KERNEL_LEVEL") == "fallback":
        return _fallback("FOREBAY_KERNEL_LEVEL=fallback asks for it")
    try:
        return importlib.import_module("forebay._core")
    except ImportError as error:
        return _fallback(f"the native core cannot be loaded ({error})")


def _fallback(reason: str) -> ModuleType:
    warnings.warn(
        f"computing with the slow fallback: {reason}; the bits are the same, updates are serial "
        "and copies overlap nothing\nhint: install a C++ compiler, then install forebay again",
        ForebayWarning,
        stacklevel=3,
    )
    return importlib.import_module("forebay._fallback")
