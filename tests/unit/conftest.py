"""Cores and pools for the tests of the native core and of its fallback."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def native() -> Any:
    """The compiled core; tests that need threads are skipped without it."""
    return pytest.importorskip("forebay._core", exc_type=ImportError)


@pytest.fixture(scope="session", params=["_core", "_fallback"])
def core(request: pytest.FixtureRequest) -> Any:
    """The compiled core and the fallback, one after the other."""
    if request.param == "_core":
        return request.getfixturevalue("native")
    return importlib.import_module(f"forebay.{request.param}")


@pytest.fixture
def pool(core: Any) -> Iterator[Any]:
    """Two workers of either core."""
    pool = core.Pool(2, [])
    yield pool
    pool.close()
