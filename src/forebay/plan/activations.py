"""Device bytes that computation takes beside weights, gradients and state: a forecast.

Counted from the layers' formulas as PyTorch and transformers write them; what belongs to torch is
forecast, never reserved.

[Note: activations] Per token, with hidden size h, query width q, key width k, feed-forward f and
items of b bytes, a block keeps for its backward
    norms      an RMS norm in several operations keeps its input in fp32 and two results: (4 + 2b) h
               each; a fused layer norm keeps its input, and its result feeds the next product: 2b h
    attention  queries, keys, values and the output, which the projection reads: b (2q + 2k);
               eager attention keeps scores before and after dropout and a mask: (2b + 1) heads s
               (Korthikanti et al. 2022, "Reducing activation recomputation", equation 2)
    mlp        gated: gate, its activation, up and their product: 4b f; plain: 2b f
With recomputation each block keeps its input, b h, and the one at work all of the above.
In layer order all micro-batches of an update keep theirs; the block at work is one micro-batch's.
Where blocks' inputs wait on the host, `ON_THEIR_WAY` and one more are on the device at once:
forward waits before a third one leaves, and backward brings up as many ahead of the one it uses.
The loss keeps three fp32 values for each logit (its log-softmax, and the gradients of that and of
the logit): 12 bytes, beside what the last norm keeps. Measured on an H200 with 16,384 tokens and
128,256 words: 28.438 GB beside the weights, where this formula gives 28.437.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from forebay.model.shape import Mlp, Norm
from forebay.plan.workload import Attention, Recompute

if TYPE_CHECKING:
    from forebay.model.shape import ModelShape
    from forebay.plan.workload import Workload

__all__ = [
    "ON_THEIR_WAY",
    "Activations",
    "MovedInputs",
    "activations",
    "kept_by_block",
    "moved_inputs",
    "peak_bytes",
]

_LOSS_BYTES_PER_LOGIT = 12
# Blocks' inputs that leave, or come back ahead of their use, at the same time: one is copied while
# the next is computed.
ON_THEIR_WAY: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes on one device, at the times that matter.

    Attributes:
        kept: By all blocks from their forward to their backward.
        block: By the block at work beside that.
        loss: While the loss is computed.
        blocks: How many there are.
        tied: Where the gradients of both uses of a tied matrix meet, beside one of them.
        here_at_most: Of `kept`, what is on the device at once; None where all of it is.
    """

    kept: int
    block: int
    loss: int
    blocks: int = 1
    tied: int = 0
    here_at_most: int | None = None

    def kept_by(self, blocks: int) -> int:
        """Bytes that the first so many blocks keep on the device."""
        nbytes = self.kept * min(blocks, self.blocks) // self.blocks
        return nbytes if self.here_at_most is None else min(nbytes, self.here_at_most)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedInputs:
    """Blocks' inputs that wait on the host, in one backward.

    Attributes:
        micro_batches: That pass each block.
        blocks: Whose inputs leave: all but the last.
        nbytes: Of one input.
    """

    micro_batches: int
    blocks: int
    nbytes: int

    @property
    def total(self) -> int:
        """Bytes that leave, and come back."""
        return self.micro_batches * self.blocks * self.nbytes

    @property
    def host_bytes(self) -> int:
        """What holds them: memory of its own for each."""
        page = mmap.PAGESIZE
        return self.micro_batches * self.blocks * (-(-self.nbytes // page) * page)

    def by_unit(self, units: int) -> tuple[int, ...]:
        """Bytes of each unit's: of what is before the blocks, the blocks, and perhaps a head."""
        each = self.micro_batches * self.nbytes
        return (0, *[each] * self.blocks, *[0] * (units - 1 - self.blocks))


def moved_inputs(shape: ModelShape, workload: Workload) -> MovedInputs:
    """The inputs that wait on the host; none where they stay."""
    return MovedInputs(
        micro_batches=workload.micro_batches_at_once,
        blocks=shape.layers - 1 if workload.moves_inputs else 0,
        nbytes=workload.tokens * workload.precision.item_bytes * shape.hidden,
    )


def _norm_bytes(shape: ModelShape, workload: Workload) -> int:
    """Of one norm, per token."""
    b, h = workload.precision.item_bytes, shape.hidden
    return (4 + 2 * b) * h if shape.norm is Norm.RMS else 2 * b * h


def kept_by_block(shape: ModelShape, workload: Workload) -> int:
    """Bytes that one block keeps for its backward; see [Note: activations]."""
    b, h = workload.precision.item_bytes, shape.hidden
    attention = float(b * (2 * shape.q_width + 2 * shape.kv_width))
    if workload.attention is Attention.EAGER:
        attention += (2 * b + 1) * shape.heads * workload.sequence
    widths = 4 if shape.mlp is Mlp.GATED else 2
    mlp = widths * b * shape.ffn
    if shape.experts is not None:
        experts = shape.experts
        # A copy of the token goes to each expert and comes back.
        mlp = widths * b * (experts.active * experts.ffn + experts.shared_ffn)
        mlp += 2 * b * h * experts.active
    each = shape.norms * _norm_bytes(shape, workload)
    return int(workload.tokens * (each + (attention + mlp) / workload.tensor_parallel))


def activations(shape: ModelShape, workload: Workload) -> Activations:
    """Bytes of activations on one device."""
    b = workload.precision.item_bytes
    block = kept_by_block(shape, workload)
    inputs = workload.tokens * b * shape.hidden
    # The gradients that pass through a block's widest layer.
    widest = max(2 * shape.ffn, 3 * shape.hidden) // workload.tensor_parallel
    passing = workload.tokens * b * widest
    loss = workload.tokens * shape.vocab * _LOSS_BYTES_PER_LOGIT // workload.tensor_parallel
    loss += workload.tokens * shape.extra_norms * _norm_bytes(shape, workload)
    layers = shape.layers * workload.micro_batches_at_once
    again = workload.recompute is Recompute.BLOCKS
    here = inputs * min(layers, ON_THEIR_WAY + 1) if workload.moves_inputs else None
    return Activations(
        kept=(inputs if again else block) * layers,
        here_at_most=here,
        block=passing + (block if again else 0),
        loss=loss,
        blocks=shape.layers,
        tied=2 * shape.tied * b * shape.vocab * shape.hidden // workload.tensor_parallel,
    )


def peak_bytes(found: Activations, *, gradients: int, held: int = 0) -> tuple[int, int]:
    """The most that activations and gradients take together.

    At the loss all blocks keep theirs, and of gradients only sums of earlier micro-batches exist;
    at the end of backward all gradients exist and one block is at work.

    Args:
        found: The activations.
        gradients: Bytes of gradients on the device when backward ends.
        held: Bytes of them that are there from one micro-batch to the next.

    Returns:
        Bytes of activations and of gradients at the higher of both peaks.
    """
    at_loss = found.kept + max(found.loss, found.block)
    at_end = found.block
    if at_end + gradients > at_loss + held:
        return at_end, gradients
    return at_loss, held
