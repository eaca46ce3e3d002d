"""What a checkpoint holds of the ZenFlow policy, beside masters, moments and weights in force.

One fp32 tensor for each parameter with columns: what is gathered of the rest, and NaN in important
columns, where nothing is gathered. Counts and the like are plain values in the manifest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from forebay.engine.policies.important import slice_of
from forebay.optim.columns import Columns

if TYPE_CHECKING:
    from forebay.checkpoint.header import TensorSpec
    from forebay.engine.record import ParamRecord

__all__ = ["GatheredSource", "ZenFlowCounts", "columns_in", "is_of_zenflow"]


@dataclass(slots=True, kw_only=True)
class ZenFlowCounts:
    """Where an interval stands; every rank has the same.

    Attributes:
        step: Updates that were applied.
        interval: Of them, those since the last update of the rest.
        gathered: By parameter, how many gradients were gathered in the interval, on any rank.
        rest_norms: By parameter, what the rest has gathered, where gradients decide.
        important_norms: The same of important columns.
        wanted: Parameters whose columns are to be chosen by their next gradient.
    """

    step: int = 0
    interval: int = 0
    gathered: dict[int, int] = field(default_factory=dict)
    rest_norms: dict[int, float] = field(default_factory=dict)
    important_norms: dict[int, float] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)

    def count(self, index: int) -> None:
        """A parameter had a gradient in this step."""
        self.gathered[index] = self.gathered.get(index, 0) + 1

    def add_norms(self, index: int, *, rest: float, other: float) -> None:
        """Norms of this step's gradient of a parameter: of the rest, and of important columns."""
        self.rest_norms[index] = self.rest_norms.get(index, 0.0) + rest
        self.important_norms[index] = self.important_norms.get(index, 0.0) + other

    def are_ripe(self, share: float) -> bool:
        """Whether the rest of so many parameters has gathered what important columns get."""
        ripe = sum(
            gathered >= self.important_norms[index] / self.interval
            for index, gathered in self.rest_norms.items()
        )
        return bool(self.rest_norms) and ripe >= share * len(self.rest_norms)

    def end_interval(self) -> None:
        """The rest is updated."""
        self.interval = 0
        for counted in (self.gathered, self.rest_norms, self.important_norms):
            counted.clear()

    def plain(self, names: dict[int, str]) -> dict[str, Any]:
        """For a manifest, by name."""
        values: dict[str, Any] = {"name": "zenflow"}
        for key, value in asdict(self).items():
            named = isinstance(value, dict)
            values[key] = {names[index]: one for index, one in value.items()} if named else value
        values["wanted"] = sorted(names[index] for index in self.wanted)
        return values

    @classmethod
    def from_plain(
        cls, values: dict[str, Any] | None, indices: dict[str, int]
    ) -> ZenFlowCounts | None:
        """The inverse of `plain`, without parameters that are not here; None of anything else."""
        if values is None or not is_of_zenflow(values):
            return None
        step, interval = values.get("step"), values.get("interval")
        named = [values.get(key) for key in ("gathered", "rest_norms", "important_norms")]
        if not _is_count(step) or not _is_count(interval):
            return None
        found = []
        for one in named:
            if not isinstance(one, dict) or not all(_is_number(number) for number in one.values()):
                return None
            found.append({indices[name]: one[name] for name in one if name in indices})
        wanted = values.get("wanted", [])
        if not isinstance(wanted, list):
            return None
        return cls(
            step=step,
            interval=interval,
            gathered={index: int(count) for index, count in found[0].items()},
            rest_norms=found[1],
            important_norms={index: found[2].get(index, 0.0) for index in found[1]},
            wanted={index for name, index in indices.items() if name in wanted},
        )


def is_of_zenflow(values: dict[str, Any] | None) -> bool:
    """Whether a checkpoint was saved in this mode, by its manifest's `policy`."""
    return values is not None and values.get("name") == "zenflow"


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and value >= 0


class GatheredSource:
    """What is gathered of a parameter, NaN in important columns.

    Args:
        spec: fp32, of as many elements.
        sums: Flat, in host memory; what it holds of important columns has no meaning.
        columns: The important columns.
        owner: Who may change the sums.
    """

    def __init__(
        self, spec: TensorSpec, sums: torch.Tensor, columns: Columns, *, owner: int | None = None
    ) -> None:
        self.spec = spec
        self.owner = owner
        self._sums = sums
        self._where = columns.where
        self._is_important = torch.zeros(columns.where.columns, dtype=torch.bool)
        self._is_important[columns.chosen] = True

    def view(self, begin: int, end: int) -> memoryview | None:
        """Nowhere: important columns are marked in a copy."""
        del begin, end
        return None

    def fill(self, begin: int, end: int, *, into: memoryview) -> None:
        """Copy elements."""
        first, last = begin // 4, end // 4
        values = torch.frombuffer(into, dtype=torch.float32)
        values.copy_(self._sums[first:last])
        column = torch.arange(self._where.start + first, self._where.start + last)
        values[self._is_important[column % self._where.columns]] = float("nan")


def columns_in(record: ParamRecord, sums: torch.Tensor, *, share: float) -> Columns | None:
    """The important columns of this rank's slice; None where they are not as many as they should.

    Args:
        record: The parameter.
        sums: What a checkpoint has of the slice, flat.
        share: The share of columns that are important.
    """
    where = slice_of(record)
    marked = torch.zeros(where.columns, dtype=torch.bool)
    column = torch.arange(where.start, where.start + where.elements) % where.columns
    marked[column[sums.isnan()]] = True
    columns = Columns(where, marked.nonzero().reshape(-1))
    exact = bool((marked[column] == sums.isnan()).all())
    return columns if exact and int(marked.sum()) <= where.kept(share) else None
