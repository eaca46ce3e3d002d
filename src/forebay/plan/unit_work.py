"""What one forward and one backward of a unit do: products, other operations, layers to issue.

See [Note: layer work] for the counts of single operations. What no kind of `LayerRates` covers runs
at the rate of a copy in the device's memory: residual sums (two in forward; five gradients meet in
backward), copies around attention, the embedding's table. Attention without a kernel of its own
writes its scores: masked, softmax, dropout, read, 15 bytes each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from forebay.hardware import layer_work
from forebay.hardware.layer_work import ATTENTION_BACKWARD, BYTES_BACKWARD
from forebay.model.shape import Mlp, Norm
from forebay.plan.workload import Attention

if TYPE_CHECKING:
    from forebay.model.shape import ModelShape
    from forebay.plan.workload import Workload

__all__ = ["Kind", "Operations", "UnitWork", "block_work", "embedding_work", "head_work"]

_SCORE_BYTES = 15
# What issuing costs, in layers as the probe writes them: transformers' own code around a Llama's
# layer takes a sixth more, and those with fused norms have half the operations.
_ISSUED = {Norm.RMS: 1.15, Norm.LAYER: 0.6, Norm.BARE: 0.6}
_EMBEDDING_ISSUED = 0.3
_HEAD_ISSUED = 0.4


class Kind(Enum):
    """Operations by their rate; all values but the last two are fields of `LayerRates`."""

    NORM = "norm"
    FUSED_NORM = "fused_norm"
    ROTATION = "rotation"
    ACTIVATION = "activation"
    ATTENTION = "attention"
    LOSS = "loss"
    SCORES = "scores"
    """Attention's products where it has no kernel of its own."""
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class Operations:
    """Bytes, or of attention operations, of one kind."""

    kind: Kind
    forward: float
    backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWork:
    """What one forward and one backward of one unit do.

    Attributes:
        products: (operations, geometric mean of widths) of the forward's matrix products.
        operations: Everything else.
        issued: What the processor has to issue, in layers as the probe writes them.
    """

    products: tuple[tuple[float, float], ...]
    operations: tuple[Operations, ...]
    issued: float


def _bytes(kind: Kind, amount: float) -> Operations:
    return Operations(kind, amount, BYTES_BACKWARD * amount)


def _product(m: float, k: float, n: float) -> tuple[float, float]:
    return 2.0 * m * k * n, (m * k * n) ** (1 / 3)


def _feed_forward(
    shape: ModelShape, tokens: float, *, tensor_parallel: int
) -> tuple[list[tuple[float, float]], float]:
    """Products of a feed-forward layer, and the width of what lies between them for a token."""
    h, ups = shape.hidden, 2 if shape.mlp is Mlp.GATED else 1

    def layer(through: float, ffn: float) -> list[tuple[float, float]]:
        return [_product(through, h, ffn)] * ups + [_product(through, ffn, h)]

    if shape.experts is None:
        ffn = shape.ffn / tensor_parallel
        return layer(tokens, ffn), ffn
    experts = shape.experts
    each, shared = experts.ffn / tensor_parallel, experts.shared_ffn / tensor_parallel
    products = layer(tokens * experts.active / experts.count, each) * experts.count
    if shared:
        products += layer(tokens, shared)
    return products, experts.active * each + shared


def _attention(shape: ModelShape, workload: Workload, *, width: float) -> list[Operations]:
    t, s = float(workload.tokens), workload.sequence
    operations = layer_work.attention_operations(tokens=t, sequence=s, width=width)
    if workload.attention is Attention.FUSED:
        return [Operations(Kind.ATTENTION, operations, ATTENTION_BACKWARD * operations)]
    # Nothing is skipped.
    operations *= 2
    scores = _SCORE_BYTES * t * shape.heads / workload.tensor_parallel * s
    return [
        Operations(Kind.SCORES, operations, ATTENTION_BACKWARD * operations),
        _bytes(Kind.COPY, scores),
    ]


def block_work(shape: ModelShape, workload: Workload) -> UnitWork:
    """Of one block, without recomputation."""
    t, h, b = float(workload.tokens), shape.hidden, workload.precision.item_bytes
    tp = workload.tensor_parallel
    q, kv = shape.q_width / tp, shape.kv_width / tp
    products = [_product(t, h, q), _product(t, h, kv), _product(t, h, kv), _product(t, q, h)]
    feed, widths = _feed_forward(shape, t, tensor_parallel=tp)
    gated = shape.mlp is Mlp.GATED
    operations = _attention(shape, workload, width=q)
    if shape.norm is Norm.RMS:
        norm = _bytes(Kind.NORM, shape.norms * t * h * layer_work.norm_bytes(b))
    else:
        norm = _bytes(Kind.FUSED_NORM, shape.norms * t * h * layer_work.fused_norm_bytes(b))
    operations += [
        norm,
        _bytes(Kind.ACTIVATION, t * widths * layer_work.activation_bytes(b, gated=gated)),
        Operations(Kind.COPY, t * 2 * 3 * b * h, t * 5 * 3 * b * h),
        _bytes(Kind.COPY, t * 2 * b * h),
    ]
    if not shape.positions:
        operations.append(_bytes(Kind.ROTATION, t * (q + kv) * layer_work.rotation_bytes(b)))
    return UnitWork(
        products=tuple(products + feed), operations=tuple(operations), issued=_ISSUED[shape.norm]
    )


def head_work(shape: ModelShape, workload: Workload) -> UnitWork:
    """Of the output layer and the loss."""
    t, words = float(workload.tokens), shape.vocab / workload.tensor_parallel
    loss = t * words * layer_work.loss_bytes(workload.precision.item_bytes)
    return UnitWork(
        products=(_product(t, shape.hidden, words),),
        operations=(_bytes(Kind.LOSS, loss),),
        issued=_HEAD_ISSUED,
    )


def embedding_work(shape: ModelShape, workload: Workload) -> UnitWork:
    """Of the embedding: backward clears the table's gradient and adds to it.

    Of a tied table it also sums the gradients of both uses.
    """
    b = workload.precision.item_bytes
    table = float(shape.vocab * shape.hidden) * b
    lookup = workload.tokens * shape.hidden * 2.0 * b
    tied = 0.0 if shape.head_shapes() else 3 * table
    return UnitWork(
        products=(),
        operations=(Operations(Kind.COPY, lookup, 2 * lookup + table + tied),),
        issued=_EMBEDDING_ISSUED,
    )
