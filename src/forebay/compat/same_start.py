"""Whether all ranks begin alike: configuration, model, weights, groups and seed.

Ranks that differ would train something, and nobody could say what.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from forebay.errors import ConfigError
from forebay.model.unbuilt import UnbuiltWeight

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from forebay.comm.group import Group
    from forebay.config.resolved import ResolvedConfig

__all__ = ["Start", "refuse_other_start"]

_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a rank begins with.

    Attributes:
        config: The resolved configuration.
        copies: The ranks that hold each copy of the state.
        model: The model, before anything is changed.
        groups: The optimizer's parameter groups.
    """

    config: ResolvedConfig
    copies: Sequence[Sequence[int]]
    model: nn.Module
    groups: Sequence[dict[str, Any]]

    def facts(self) -> list[tuple[str, str]]:
        """Names and values, in the order in which differences are told.

        The model comes first: what the configuration leaves open follows from its dtypes.
        """
        shared = ("how ranks share copies of the state", str([list(one) for one in self.copies]))
        seed = ("torch's seed", str(torch.initial_seed()))
        model, groups = _of_model(self.model), _of_groups(self.groups)
        return [*model, *_of_config(self.config), shared, *groups, seed]


def refuse_other_start(group: Group, start: Start) -> None:
    """Compare this rank with rank 0.

    Args:
        group: The ranks.
        start: What this one begins with.

    Raises:
        ConfigError: On every rank, when one differs from rank 0; names the first difference.
    """
    texts = group.compare(json.dumps(start.facts()), what="the start")
    first = json.loads(texts[0])
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise _difference(first, json.loads(text), rank=rank)


def _difference(first: list[list[str]], other: list[list[str]], *, rank: int) -> ConfigError:
    hints = {
        "torch's seed": "call torch.manual_seed with the same number on every rank before the "
        "model is built; give ranks dropout of their own by seeding again after initialize()",
    }
    for (name, value), (other_name, other_value) in zip(first, other, strict=False):
        if name != other_name:
            return ConfigError(
                f"rank {rank} has {other_name} where rank 0 has {name}",
                hint="build the same model with the same configuration on every rank",
            )
        if value != other_value:
            return ConfigError(
                f"{name} is {other_value} on rank {rank} and {value} on rank 0",
                hint=hints.get(
                    name, "start every rank with the same configuration, model, weights and seed"
                ),
            )
    return ConfigError(
        f"rank {rank} has {len(other)} settings and parameters, rank 0 has {len(first)}",
        hint="build the same model with the same configuration on every rank",
    )


def _of_config(config: ResolvedConfig) -> list[tuple[str, str]]:
    def _walk(path: str, value: Any) -> list[tuple[str, str]]:
        if isinstance(value, dict):
            pairs = sorted(value.items())
            return [fact for k, v in pairs for fact in _walk(f"{path}.{k}" if path else k, v)]
        return [(f"config key {path}", json.dumps(value))]

    return _walk("", config.as_dict())


def _of_model(model: nn.Module) -> list[tuple[str, str]]:
    facts = []
    for name, param in model.named_parameters():
        kind = "trained" if param.requires_grad else "frozen"
        facts.append((f"parameter {name}", f"{list(param.shape)} {param.dtype} {kind}"))
        facts.append((f"the checksum of parameter {name}", _checksum(param)))
    for name, buffer in _saved_buffers(model):
        facts.append((f"buffer {name}", f"{list(buffer.shape)} {buffer.dtype}"))
        facts.append((f"the checksum of buffer {name}", _checksum(buffer)))
    return facts


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of checkpoints, which have rank 0's; others may hold what is a rank's own."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def _checksum(values: torch.Tensor) -> str:
    """Sum of the words of its bits: what rounding could hide differs here."""
    if isinstance(values, UnbuiltWeight):
        return f"recipe {values.recipe.fingerprint()}"
    data = values.detach()
    if data.is_meta or type(data.data) is not torch.Tensor or data.layout is not torch.strided:
        return "not read"
    if data.is_quantized or data.element_size() not in _BY_SIZE:
        return "not read"
    words = data.contiguous().view(_BY_SIZE[data.element_size()])
    return str(int(words.sum(dtype=torch.int64)))


def _of_groups(groups: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    facts = []
    for index, group in enumerate(groups):
        for name, value in group.items():
            shown = len(value) if name == "params" else value
            facts.append((f"{name} of parameter group {index}", str(shown)))
    return facts
