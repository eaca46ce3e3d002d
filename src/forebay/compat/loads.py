"""DeepSpeed's limits on weights that come and go, in forebay's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.compat.inputs import DTYPES
from forebay.plan.load_rules import LoadRules

if TYPE_CHECKING:
    from forebay.config.resolved import ResolvedConfig

__all__ = ["load_rules"]


def load_rules(config: ResolvedConfig) -> LoadRules:
    """The rules that a configuration asks for."""
    spec, item = config.zero.loads, DTYPES[config.precision.dtype].itemsize
    ahead, reuse = spec.prefetch_elements, spec.reuse_elements
    return LoadRules(
        ahead_bytes=None if ahead is None else item * ahead,
        reuse_bytes=None if reuse is None else item * reuse,
        persistent_elements=spec.persistent_elements,
        persistent_total=spec.persistent_total,
    )
