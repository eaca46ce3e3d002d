"""How gradients go between ranks, and how many of them share one copy of the state: the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from forebay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.config.lookup import Lookup

__all__ = ["ExchangeSpec", "resolve_exchange"]

_REDUCTION: Final = "forebay.reduction"
_DTYPE: Final = "communication_data_type"
_SHARERS: Final = "zero_optimization.mics_shard_size"
_SHOWN: Final = 6
_DTYPES: Final[dict[str, Literal["float32", "bfloat16", "float16"]]] = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "bfp16": "bfloat16",
}
_WORDS: Final = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSpec:
    """What happens between ranks.

    Attributes:
        reduction: "ranked": sums in fp32, in the order of ranks; "library": the library's own.
        dtype: In what gradients travel; None is their own type, and float32 for sums of several.
        sharers: Ranks that share one copy of the state; None is all of them.
    """

    reduction: Literal["ranked", "library"] = "ranked"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    sharers: int | None = None

    def top_keys(self) -> dict[str, Any]:
        """The keys of the configuration's top level."""
        return {} if self.dtype is None else {_DTYPE: _WORDS[self.dtype]}

    def zero_keys(self) -> dict[str, Any]:
        """The keys of `zero_optimization`."""
        return {} if self.sharers is None else {"mics_shard_size": self.sharers}


def resolve_exchange(lookup: Lookup) -> ExchangeSpec:
    """Answers those keys.

    Raises:
        ConfigError: The ranks do not come out in groups of `mics_shard_size`.
    """
    reduction = lookup.take(_REDUCTION)
    dtype = lookup.take(_DTYPE)
    sharers: int | None = lookup.take(_SHARERS)
    ranks = lookup.facts.world_size
    if ranks == 1:
        for path in (_REDUCTION, _DTYPE, _SHARERS):
            if lookup.is_written(path):
                lookup.annotate(path, "changes nothing: one process exchanges nothing")
    if sharers is not None and sharers < 1:
        sharers = None
    if sharers is not None and ranks > 1:
        if ranks % sharers or sharers == 1:
            fitting = _listed([n for n in range(2, ranks + 1) if ranks % n == 0])
            raise ConfigError(
                f"config key {_SHARERS} is {sharers}, and there are {ranks} ranks",
                hint=f"write {fitting}, or delete it: all ranks share one copy then, and with "
                "stage 0 each has its own",
            )
        copies = ranks // sharers
        lookup.annotate(_SHARERS, f"{copies} copies of the state, each over {sharers} ranks")
    return ExchangeSpec(
        reduction=reduction, dtype=None if dtype is None else _DTYPES[dtype], sharers=sharers
    )


def _listed(numbers: Sequence[int]) -> str:
    """The first of them, at most."""
    return ", ".join(map(str, numbers[:_SHOWN])) + (", ..." if len(numbers) > _SHOWN else "")
