"""Which modules' parameters stay in one unit: the section `leaf_module`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from forebay.config.lookup import Lookup

__all__ = ["LeafSpec", "resolve_leaf"]

_SECTION: Final = "zero_optimization.leaf_module"
_NAMES: Final = ("classes", "names", "name_suffixes")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSpec:
    """Modules, by what they are called.

    Attributes:
        classes: Class names, plain or with their module.
        names: Names in `model.named_modules()`.
        name_suffixes: Ends of such names.
    """

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The keys of the section."""
        return {name: [*getattr(self, name)] for name in _NAMES}


def resolve_leaf(lookup: Lookup) -> LeafSpec | None:
    """What the section names; None where there is none."""
    if _SECTION not in lookup.values.sections:
        return None
    return LeafSpec(**{name: tuple(lookup.take(f"{_SECTION}.{name}")) for name in _NAMES})
