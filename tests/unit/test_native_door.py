"""The door: the compiled core when it is there, the fallback with one warning when it is not."""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest

from forebay import native as door
from forebay.errors import ForebayWarning


@pytest.fixture
def fresh_door():
    door.core.cache_clear()
    yield door
    door.core.cache_clear()


def test_the_compiled_core_comes_without_a_warning(native, fresh_door, monkeypatch, recwarn):
    monkeypatch.delenv("FOREBAY_KERNEL_LEVEL", raising=False)
    assert fresh_door.core() is native
    assert not recwarn.list


def test_without_it_the_fallback_comes_with_one_warning(fresh_door, monkeypatch):
    monkeypatch.delenv("FOREBAY_KERNEL_LEVEL", raising=False)
    monkeypatch.setitem(sys.modules, "forebay._core", None)
    with pytest.warns(ForebayWarning, match="slow fallback.*\nhint:") as seen:
        core = fresh_door.core()
        assert fresh_door.core() is core
    assert len(seen) == 1
    assert core.kernel_level() == "fallback"


def test_the_fallback_can_be_asked_for(fresh_door, monkeypatch):
    monkeypatch.setenv("FOREBAY_KERNEL_LEVEL", "fallback")
    with pytest.warns(ForebayWarning, match="asks for it"):
        assert fresh_door.core().kernel_level() == "fallback"


def test_both_have_the_same_names(native):
    fallback = importlib.import_module("forebay._fallback")
    for name in fallback.__all__:
        mine, theirs = getattr(fallback, name), getattr(native, name)
        if not inspect.isclass(mine):
            continue
        public = {n for n in dir(theirs) if not n.startswith("_")}
        assert public <= set(dir(mine)) | set(getattr(mine, "__annotations__", ())) | _set_in_init(
            mine
        ), name
    assert {n for n in dir(native) if not n.startswith("_")} <= set(fallback.__all__)


def _set_in_init(cls) -> set[str]:
    source = inspect.getsource(cls)
    return {word.split(".")[1].split()[0] for word in source.split("\n") if " self." in word}
