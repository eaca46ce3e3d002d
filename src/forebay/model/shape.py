"""A language model as a dozen numbers: what a planner needs of one that does not exist yet.

From them follow parameters by unit, in the order and with the units that the engine finds in the
model's module tree. Pure values; reading configuration files is `plan.model_config`'s part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from forebay.model.spec import ModelSpec, ParamSpec, UnitSpec

__all__ = ["Experts", "Mlp", "ModelShape", "Norm"]


class Mlp(Enum):
    """What a feed-forward layer consists of."""

    GATED = "gated"
    """Gate, up and down: SwiGLU and its like."""
    PLAIN = "plain"
    """Up and down with an activation between: GELU or ReLU."""


class Norm(Enum):
    """Which normalisation, and what it costs."""

    RMS = "rms"
    """A scale; written in several operations by most models, in fp32 inside."""
    LAYER = "layer"
    """A scale and a shift, in one fused operation."""
    BARE = "bare"
    """No parameters."""

    @property
    def vectors(self) -> int:
        """Parameters of one, in vectors of the hidden size."""
        return {Norm.RMS: 1, Norm.LAYER: 2, Norm.BARE: 0}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the feed-forward layer.

    Attributes:
        count: Experts in each layer.
        active: Of which each token uses so many.
        ffn: Feed-forward size of each.
        shared_ffn: Of the expert that every token uses; 0 without.
    """

    count: int
    active: int
    ffn: int
    shared_ffn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a decoder.

    Attributes:
        name: For messages.
        layers: Blocks.
        hidden: Hidden size.
        heads: Attention heads.
        kv_heads: Heads of keys and values.
        head_dim: Size of each.
        ffn: Feed-forward size.
        vocab: Vocabulary.
        tied: 1 where the output layer shares the embedding's weight, else 0.
        mlp: Kind of feed-forward layer.
        norm: Kind of normalisation.
        norms: Of them in each block.
        qk_norms: Size of the norms on queries and keys; 0 without.
        positions: Rows of learned positions; 0 for rotary ones.
        qkv_bias: 1 where queries, keys and values have biases.
        out_bias: 1 where attention's output has one.
        mlp_bias: 1 where feed-forward layers have them.
        extra_norms: Norms outside the blocks.
        experts: In place of the feed-forward layer; None without.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: int
    mlp: Mlp = Mlp.GATED
    norm: Norm = Norm.RMS
    norms: int = 2
    qk_norms: int = 0
    positions: int = 0
    qkv_bias: int = 0
    out_bias: int = 0
    mlp_bias: int = 0
    extra_norms: int = 1
    experts: Experts | None = None

    @property
    def q_width(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads, or of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """All of them."""
        outer = [*self.embedding_shapes(), *self.head_shapes()]
        return _count(outer) + self.layers * self.block_parameters

    @property
    def block_parameters(self) -> int:
        """Of one block."""
        return _count(self.block_shapes())

    @property
    def active_block_parameters(self) -> int:
        """Those of a block that one token uses."""
        if self.experts is None:
            return self.block_parameters
        idle = self.experts.count - self.experts.active
        return self.block_parameters - idle * 3 * self.hidden * self.experts.ffn

    @property
    def largest_matrix(self) -> int:
        """Parameters of the largest matrix."""
        shapes = [*self.embedding_shapes(), *self.block_shapes(), *self.head_shapes()]
        return max(math.prod(shape) for shape in shapes)

    def unit_elements(self) -> list[int]:
        """Parameters of each unit, in the order of `spec`."""
        head = _count(self.head_shapes())
        outer = [_count(self.embedding_shapes()), *[self.block_parameters] * self.layers]
        return [*outer, head] if head else outer

    def embedding_shapes(self) -> list[tuple[int, ...]]:
        """Parameters before the blocks."""
        found: list[tuple[int, ...]] = [(self.vocab, self.hidden)]
        if self.positions:
            found.append((self.positions, self.hidden))
        return found

    def block_shapes(self) -> list[tuple[int, ...]]:
        """Parameters of one block."""
        h, q, kv = self.hidden, self.q_width, self.kv_width
        found: list[tuple[int, ...]] = [(q, h), (kv, h), (kv, h), (h, q)]
        found += [(q,), (kv,), (kv,)] * self.qkv_bias + [(h,)] * self.out_bias
        found += [(self.qk_norms,)] * 2 if self.qk_norms else []
        found += [(h,)] * (self.norms * self.norm.vectors)
        if self.experts is None:
            return [*found, *self._mlp_shapes(self.ffn)]
        found.append((self.experts.count, h))
        # Experts lie in one tensor for gate and up and one for down.
        found.append((self.experts.count, 2 * self.experts.ffn, h))
        found.append((self.experts.count, h, self.experts.ffn))
        if self.experts.shared_ffn:
            found += [*self._mlp_shapes(self.experts.shared_ffn), (1, h)]
        return found

    def _mlp_shapes(self, ffn: int) -> list[tuple[int, ...]]:
        h = self.hidden
        gate: list[tuple[int, ...]] = [(ffn, h)] if self.mlp is Mlp.GATED else []
        biases: list[tuple[int, ...]] = [*[(ffn,)] * (len(gate) + 1), (h,)]
        return [*gate, (ffn, h), (h, ffn), *(biases if self.mlp_bias else [])]

    def head_shapes(self) -> list[tuple[int, ...]]:
        """Parameters after the blocks."""
        norms: list[tuple[int, ...]] = [(self.hidden,)] * (self.extra_norms * self.norm.vectors)
        return norms if self.tied else [*norms, (self.vocab, self.hidden)]

    def spec(self, dtype: str) -> ModelSpec:
        """Its units: what is before the blocks, each block, what is after them.

        Args:
            dtype: Working dtype of every weight.
        """
        groups = [("embedding", self.embedding_shapes())]
        groups += [(f"layers.{i}", self.block_shapes()) for i in range(self.layers)]
        groups.append(("head", self.head_shapes()))
        units, index = [], 0
        for name, shapes in groups:
            params = tuple(
                ParamSpec(
                    index=index + place,
                    names=(f"{name}.{place}",),
                    shape=shape,
                    dtype=dtype,
                    group=0,
                )
                for place, shape in enumerate(shapes)
            )
            index += len(params)
            if params:
                units.append(UnitSpec(name=name, params=params))
        return ModelSpec(units=tuple(units))


def _count(shapes: list[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)
