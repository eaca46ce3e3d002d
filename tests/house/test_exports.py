"""`__all__` is sorted, says what is there, and leaves nothing public out."""

from __future__ import annotations
import __future__

import ast
import importlib
import types
import typing

import pytest

from house.tree import SRC, files, module_name, parse

_MODULES = {module_name(path): path for path in files(".py", under=SRC)}
_PACKAGES = sorted(name for name, path in _MODULES.items() if path.name == "__init__.py")

# Names that an `__init__` may bind without meaning to export them.
_PLUMBING = {"TYPE_CHECKING", "Any", "Final"}


def _public(module: types.ModuleType) -> set[str]:
    names = set()
    for name in dir(module):
        if name == "__version__":
            names.add(name)
        if name.startswith("_") or name in _PLUMBING:
            continue
        value = getattr(module, name)
        plumbing = isinstance(value, types.ModuleType | __future__._Feature)
        if not plumbing and value is not typing.TYPE_CHECKING:
            names.add(name)
    return names


def _declared(name: str) -> list[str] | None:
    for node in parse(_MODULES[name]).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            return list(ast.literal_eval(node.value))
    return None


def _order(name: str) -> tuple[int, str]:
    """Orders constants before classes before functions, as ruff's RUF022 does."""
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name


@pytest.mark.parametrize("name", _PACKAGES)
def test_package_exports_its_namespace(name: str) -> None:
    """A package's `__all__` is its namespace: neither hides nor invents a name."""
    module = importlib.import_module(name)
    declared = _declared(name)
    public = _public(module)
    if declared is None:
        assert not public, f"{name} binds public names but has no __all__"
    else:
        assert set(declared) == public


@pytest.mark.parametrize("name", sorted(_MODULES))
def test_all_is_sorted(name: str) -> None:
    """A module that has `__all__` sorts it and names nothing twice, and nothing that is absent."""
    declared = _declared(name)
    if declared is None:
        pytest.skip("no __all__")
    assert declared == sorted(set(declared), key=_order)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    assert not [entry for entry in declared if not hasattr(module, entry)]


def test_every_public_name_resolves() -> None:
    """Each lazily loaded name of `forebay` exists where the table says."""
    import forebay

    for name in forebay.__all__:
        assert getattr(forebay, name) is not None
