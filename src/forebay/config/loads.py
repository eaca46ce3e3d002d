"""What of streamed or gathered weights is on the device at a time: the keys of ZeRO's stage 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from forebay.config.rows import Source
from forebay.config.tables import TABLE

if TYPE_CHECKING:
    from forebay.config.lookup import Lookup

__all__ = ["LoadSpec", "resolve_loads"]

# Field of `LoadSpec` to DeepSpeed's key, and what a default that nobody wrote leaves to forebay.
_KEYS: Final = {
    "live_elements": (
        "stage3_max_live_parameters",
        "where forebay.device_budget does not say otherwise",
    ),
    "prefetch_elements": ("stage3_prefetch_bucket_size", "as far ahead as there is room"),
    "reuse_elements": ("stage3_max_reuse_distance", "until others need the room"),
    "persistent_elements": ("stage3_param_persistence_threshold", "none stays for good"),
    "persistent_total": ("stage3_model_persistence_threshold", "no limit"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """Limits in elements; None leaves the choice to forebay.

    Attributes:
        live_elements: Weights that may be on the device at a time.
        prefetch_elements: Weights that are brought ahead of their use.
        reuse_elements: A unit that is used again after more elements than these is let go.
        persistent_elements: Units of at most so many stay for good.
        persistent_total: All that stay for good together.
    """

    live_elements: int | None = None
    prefetch_elements: int | None = None
    reuse_elements: int | None = None
    persistent_elements: int | None = None
    persistent_total: int | None = None

    def as_dict(self) -> dict[str, int]:
        """The keys of `zero_optimization` that say so."""
        values = {key: getattr(self, name) for name, (key, _) in _KEYS.items()}
        return {key: value for key, value in values.items() if value is not None}


def resolve_loads(lookup: Lookup, *, moot: str = "") -> LoadSpec:
    """Answers those keys.

    Args:
        lookup: The configuration.
        moot: Why they change nothing; "" where weights come and go.
    """
    paths = {name: f"zero_optimization.{key}" for name, (key, _) in _KEYS.items()}
    if moot:
        lookup.moot(list(paths.values()), note=f"changes nothing: {moot}")
        return LoadSpec()
    limits: dict[str, int | None] = {}
    for name, path in paths.items():
        elements, source = lookup.answer(path)
        says_nothing = elements == TABLE[path].default and source is not Source.GIVEN
        limits[name] = None if says_nothing else elements
        lookup.record(path, elements, source, note=_KEYS[name][1] if says_nothing else "")
    return LoadSpec(**limits)
