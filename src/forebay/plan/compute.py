"""Seconds of forward and backward by unit: a roofline over a device's measured rates.

[Note: roofline] Matrix products run at the rate that their size reaches (the geometric mean of
their three widths against the profile's table); everything else moves bytes at the bandwidth of
device memory: counted operation by operation as transformers writes the layers (bytes read and
written per token, b bytes an item; twice that in backward). Kernels are launched ahead of a device
of its own, so the longer of work and launches counts; on `cpu` both add up.
    RMS norm    to fp32, square, mean, scale, back, weight: 36 h; a fused layer norm 2b h
    rotation    two products, a half turned around, a sum: 8b for each query and key
    residuals   3b h each; copies around attention 2b h
    mlp         gated: activation and product 5b f; plain 2b f
    eager attention: scores written, masked, softmax, dropout, read: 15 bytes a score
    loss        logits to fp32, log-softmax and both backwards: 40 bytes a logit
A product costs backward two, for its input's gradient and its weight's; behind a frozen weight one.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from forebay.errors import ConfigError
from forebay.model.shape import Mlp, Norm
from forebay.plan.simulate import ComputeSeconds
from forebay.plan.workload import Attention, Recompute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.hardware.profile import Profile
    from forebay.model.shape import ModelShape
    from forebay.plan.workload import Workload

__all__ = ["BlockMatrices", "BlockWork", "compute_seconds", "matrix_rate", "model_flops"]

_LOSS_BYTES_PER_LOGIT = 40
# Wider than any row of a profile.
_WIDE = 1e9
# Kernels of a block's forward as transformers writes it.
_LAUNCHES = {Norm.RMS: 60, Norm.LAYER: 30, Norm.BARE: 30}


class BlockMatrices(Enum):
    """Whether the matrices of blocks are trained."""

    TRAINED = "trained"
    FROZEN = "frozen"
    """Gradients pass through them, and none is computed of them."""

    @property
    def backward_products(self) -> float:
        """Products of a backward for each of the forward's."""
        return 2.0 if self is BlockMatrices.TRAINED else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """What one forward of one unit does.

    Attributes:
        products: (operations, geometric mean of widths) of its matrix products.
        scores: Operations of attention.
        nbytes: Bytes that everything else reads and writes.
        launches: Kernels.
    """

    products: tuple[tuple[float, float], ...]
    scores: float
    nbytes: float
    launches: int


def matrix_rate(profile: Profile, *, dtype: str, size: float) -> float:
    """Operations per second of products of a size.

    Raises:
        ConfigError: The device has no rate for the dtype.
    """
    rows = [rate for rate in profile.matrix if rate.dtype == dtype]
    if not rows:
        known = ", ".join(sorted({rate.dtype for rate in profile.matrix})) or "none"
        raise ConfigError(
            f"{profile.machine.device} has no rate for {dtype} (known: {known})",
            hint="choose another precision, such as --precision fp16",
        )
    place = bisect.bisect_left([row.size for row in rows], size)
    if place == len(rows):
        return rows[-1].flops
    if place == 0:
        return rows[0].flops * min(1.0, size / rows[0].size)
    low, high = rows[place - 1], rows[place]
    share = math.log(size / low.size) / math.log(high.size / low.size)
    return low.flops * math.exp(share * math.log(high.flops / low.flops))


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


def _block(shape: ModelShape, workload: Workload) -> BlockWork:
    t, h, b = float(workload.tokens), shape.hidden, workload.precision.item_bytes
    tp = workload.tensor_parallel
    q, kv = shape.q_width / tp, shape.kv_width / tp
    products = [_product(t, h, q), _product(t, h, kv), _product(t, h, kv), _product(t, q, h)]
    feed, widths = _feed_forward(shape, t, tensor_parallel=tp)
    products += feed
    fused = workload.attention is Attention.FUSED
    # A causal kernel skips the half of the scores that is masked.
    scores = (2.0 if fused else 4.0) * t * workload.sequence * q
    norm = 36 * h if shape.norm is Norm.RMS else 2 * b * h
    per_token: float = shape.norms * norm + 2 * 3 * b * h + 2 * b * h
    if not shape.positions:
        per_token += 8 * b * (q + kv)
    per_token += (5 * b if shape.mlp is Mlp.GATED else 2 * b) * widths
    if not fused:
        per_token += 15 * shape.heads / tp * workload.sequence
    return BlockWork(
        products=tuple(products),
        scores=scores,
        nbytes=t * per_token,
        launches=_LAUNCHES[shape.norm],
    )


def _head(shape: ModelShape, workload: Workload) -> BlockWork:
    t, words = float(workload.tokens), shape.vocab / workload.tensor_parallel
    return BlockWork(
        products=(_product(t, shape.hidden, words),),
        scores=0.0,
        # A third of the loss's bytes in forward, as backward counts twice.
        nbytes=t * words * _LOSS_BYTES_PER_LOGIT / 3,
        launches=20,
    )


def _embedding(shape: ModelShape, workload: Workload) -> BlockWork:
    b = workload.precision.item_bytes
    table = float(shape.vocab * shape.hidden)
    # Backward clears the table's gradient and adds to it.
    lookup = workload.tokens * shape.hidden * 2 * b
    return BlockWork(products=(), scores=0.0, nbytes=lookup + table * b / 2, launches=5)


def _seconds(
    work: BlockWork,
    *,
    profile: Profile,
    dtype: str,
    matrices: BlockMatrices = BlockMatrices.TRAINED,
) -> tuple[float, float]:
    """(forward, backward) without recomputation."""
    memory = profile.device_memory or max(rate.copy for rate in profile.threads)
    launch = (profile.launch_seconds or 0.0) * work.launches
    flops = sum(f / matrix_rate(profile, dtype=dtype, size=size) for f, size in work.products)
    peak = matrix_rate(profile, dtype=dtype, size=_WIDE)
    # Softmax between its two products keeps attention at about half of their rate (Dao 2023).
    scores = work.scores / (peak / 2)
    moved = work.nbytes / memory
    forward = flops + scores + moved
    backward = matrices.backward_products * flops + 2.5 * scores + 2 * moved
    if profile.machine.device == "cpu":
        forward, backward = forward + launch, backward + 2 * launch
    else:
        forward, backward = max(forward, launch), max(backward, 2 * launch)
    factor = profile.corrections.compute
    return factor * forward, factor * backward


def compute_seconds(
    shape: ModelShape,
    *,
    workload: Workload,
    profile: Profile,
    matrices: BlockMatrices = BlockMatrices.TRAINED,
) -> ComputeSeconds:
    """Seconds of one micro-batch by unit, in the order of `shape.spec`.

    See [Note: roofline].

    Args:
        shape: The model.
        workload: Its micro-batch.
        profile: The machine.
        matrices: Whether those of the blocks are trained.

    Raises:
        ConfigError: The device has no rate for the precision.
    """
    dtype = workload.precision.dtype
    embedding = _seconds(_embedding(shape, workload), profile=profile, dtype=dtype)
    block = _seconds(_block(shape, workload), profile=profile, dtype=dtype, matrices=matrices)
    head = _seconds(_head(shape, workload), profile=profile, dtype=dtype)
    if workload.recompute is Recompute.BLOCKS:
        block = (block[0], block[0] + block[1])
    units: Sequence[tuple[float, float]] = [embedding, *[block] * shape.layers]
    if shape.head_shapes():
        units = [*units, head]
    else:
        units = [*units[:-1], (units[-1][0] + head[0], units[-1][1] + head[1])]
    return ComputeSeconds(
        forward=tuple(one[0] for one in units), backward=tuple(one[1] for one in units)
    )


def model_flops(shape: ModelShape, workload: Workload) -> float:
    """Operations of one update on one device, recomputation counted where it happens.

    Matrix products of the parameters alone: 8 N T with recomputation, 6 N T without.
    """
    times = 8.0 if workload.recompute is Recompute.BLOCKS else 6.0
    blocks = shape.layers * shape.active_block_parameters
    head = shape.vocab * shape.hidden
    tokens = workload.tokens_per_update
    return tokens * (times * blocks + 6.0 * head) / workload.tensor_parallel
