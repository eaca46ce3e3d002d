"""`set_z3_leaf_modules` and its family: modules that are moved and updated as one.

DeepSpeed's stage 3 gathers a leaf module whole, which modules need that choose their parameters
by data (experts). Here such a module's parameters lie in one unit. The marks are read when
`initialize` or `offload` takes the model over.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, TypeAlias

from torch import nn

from forebay.compat.flags import check_flags
from forebay.engine.collector import hook_of
from forebay.errors import ConfigError, UnsupportedError
from forebay.model.whole import is_whole, mark_whole, unmark_whole, whole_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from forebay.config.leaf import LeafSpec

    _Fits: TypeAlias = Callable[[str, nn.Module, str], bool]

__all__ = [
    "configured_leaves",
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

_log = logging.getLogger("forebay")


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Iterable[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Keep the parameters of each module of these classes in one unit.

    Args:
        model: The model, before `initialize`.
        leaf_module_classes: Classes (their subclasses count), or class names, plain
            ("MixtralSparseMoeBlock") or with their module.
        raise_if_not_found: Whether it is an error when the model has no such module.

    Returns:
        The modules that were marked.

    Raises:
        ConfigError: A class is of the wrong type, or none was found.
        UnsupportedError: The model is trained by an open engine already.

    Example:
        >>> experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        >>> set_z3_leaf_modules(nn.Sequential(experts), [nn.ModuleList]) == [experts]
        True
    """
    return _by_class(
        model, leaf_module_classes, mark=mark_whole, raise_if_not_found=raise_if_not_found
    )


def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Iterable[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Take the mark of `set_z3_leaf_modules` away; arguments and result are the same."""
    return _by_class(
        model, leaf_module_classes, mark=unmark_whole, raise_if_not_found=raise_if_not_found
    )


def set_z3_leaf_module(model: nn.Module, flag: bool = True) -> None:
    """Mark one module itself, or take its mark away."""
    check_flags("set_z3_leaf_module", flag=flag)
    _refuse_trained(model)
    (mark_whole if flag else unmark_whole)(model)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in `model.named_modules()`.

    Returns:
        The modules found, and the names that none has.
    """
    return _by_text(
        model,
        module_names,
        matches=_FITS["names"],
        flag=flag,
        raise_if_not_found=raise_if_not_found,
    )


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the end of their names.

    Returns:
        The modules found, and the suffixes that none has.
    """
    return _by_text(
        model,
        module_name_suffixes,
        matches=_FITS["name_suffixes"],
        flag=flag,
        raise_if_not_found=raise_if_not_found,
    )


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of a model."""
    return whole_modules(model)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module itself is marked."""
    return is_whole(model)


def configured_leaves(model: nn.Module, spec: LeafSpec | None) -> list[nn.Module]:
    """The modules that a configuration names; a text that fits none is warned of."""
    if spec is None:
        return []
    found: dict[str, list[nn.Module]] = {}
    for key, matches in _FITS.items():
        hits = _hits(model, getattr(spec, key), matches=matches)
        for text in (text for text, modules in hits.items() if not modules):
            _log.warning(
                "config key zero_optimization.leaf_module.%s names %s, and no module of the "
                "model is called so",
                key,
                text,
            )
        found[key] = _each_once(hits)
    return _each_once(found)


def _by_class(
    model: nn.Module,
    classes: Iterable[type[nn.Module] | str],
    *,
    mark: Callable[[nn.Module], None],
    raise_if_not_found: bool,
) -> list[nn.Module]:
    check_flags("set_z3_leaf_modules", raise_if_not_found=raise_if_not_found)
    wanted = [classes] if isinstance(classes, type | str) else list(classes)
    for entry in wanted:
        if not isinstance(entry, type | str):
            raise ConfigError(
                f"a leaf module class is a class or its name, not {type(entry).__name__}",
                hint="set_z3_leaf_modules(model, [MixtralSparseMoeBlock])",
            )
    found = [module for module in model.modules() if any(_is(module, entry) for entry in wanted)]
    if not found and raise_if_not_found:
        shown = ", ".join(w if isinstance(w, str) else w.__name__ for w in wanted) or "(no class)"
        raise ConfigError(f"the model has no module of class {shown}")
    _refuse_trained(model)
    for module in found:
        mark(module)
    return found


def _is(module: nn.Module, wanted: type | str) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    kind = type(module)
    return wanted in {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}


# Whether a module fits a text, by the key of the section `leaf_module` that names it so: its name,
# the module, the text.
_FITS: Final[dict[str, _Fits]] = {
    "classes": lambda _name, module, text: _is(module, text),
    "names": lambda name, _module, text: name == text,
    "name_suffixes": lambda name, _module, text: name.endswith(text),
}


def _hits(model: nn.Module, texts: Iterable[str], *, matches: _Fits) -> dict[str, list[nn.Module]]:
    """The modules that fit each text."""
    named = dict(model.named_modules())
    return {text: [m for name, m in named.items() if matches(name, m, text)] for text in texts}


def _each_once(hits: dict[str, list[nn.Module]]) -> list[nn.Module]:
    return list({id(m): m for modules in hits.values() for m in modules}.values())


def _by_text(
    model: nn.Module,
    texts: Iterable[str],
    *,
    matches: _Fits,
    flag: bool,
    raise_if_not_found: bool,
) -> tuple[list[nn.Module], list[str]]:
    check_flags("set_z3_leaf_modules", flag=flag, raise_if_not_found=raise_if_not_found)
    wanted = [texts] if isinstance(texts, str) else list(texts)
    hits = _hits(model, wanted, matches=matches)
    missing = [text for text, modules in hits.items() if not modules]
    if missing and raise_if_not_found:
        raise ConfigError(
            f"the model has no module named {', '.join(missing)}",
            hint="the names are those of model.named_modules()",
        )
    found = _each_once(hits)
    _refuse_trained(model)
    for module in found:
        (mark_whole if flag else unmark_whole)(module)
    return found, missing


def _refuse_trained(model: nn.Module) -> None:
    if any(hook_of(param) is not None for param in model.parameters()):
        raise UnsupportedError(
            "leaf modules were set on a model that is trained already: its units are fixed",
            hint="call set_z3_leaf_modules(model, ...) before initialize(model=model, ...)",
        )
