"""Published systems as setups with other habits, to hold the model against figures of others.

Each habit has its source. Nothing here is tuned to a figure: a system differs from forebay only in
what its papers and documents say that it does.
"""

from __future__ import annotations

from forebay.plan.setup import Habits, Home, Overlap

__all__ = ["DDP", "L2L_TRAFFIC", "ZERO", "ZERO_2", "ZERO_INFINITY", "ZERO_OFFLOAD", "efficiency"]

# Megatron-LM's documentation of its fp16 optimizer ("dist_optimizer"): 20 bytes per parameter, 4
# beyond weights, gradients and state, for fp32 gradients; and DistributedDataParallel's buckets
# hold the gradients once more (torch.nn.parallel.DistributedDataParallel, gradient_as_bucket_view).
DDP = Habits(name="PyTorch DDP", device_extra=4 + 2, update=Overlap.AFTER)

# DeepSpeed's documentation: overlap_comm is off by default in stages 1 and 2; gradients and weights
# each go through a bucket of 5e8 elements.
_BUCKETS = 2 * 500_000_000 * 2

# The ZeRO paper's analysis, section 5: 16-bit weights and gradients and 12 bytes of state, each
# whole or shared; nothing in passing.
ZERO = Habits(name="ZeRO")

ZERO_2 = Habits(name="ZeRO-2", buckets=_BUCKETS, collectives=Overlap.AFTER, update=Overlap.AFTER)

# The ZeRO-Offload paper, section 4: fp32 master, momentum, variance and gradient live on the host
# beside the 16-bit copies that cross (20 bytes); the update follows the backward. It passes over
# memory for unscaling, Adam and casting: 44 bytes per parameter.
ZERO_OFFLOAD = Habits(
    name="ZeRO-Offload",
    host_bytes=20,
    buckets=_BUCKETS,
    update_traffic=44,
    collectives=Overlap.AFTER,
    update=Overlap.AFTER,
)

# The ZeRO-Infinity paper, section 3: 20 bytes per parameter on the slow tier; state is read and
# written once in an update (section 4: 2 x 16 bytes per parameter) and does not overlap with
# forward and backward; activation checkpoints go to host memory. Weights come by matrix, and large
# ones in 16 tiles (section 5.1.3 and figure 6b).
ZERO_INFINITY = Habits(
    name="ZeRO-Infinity",
    host_bytes=20,
    state_traffic=32,
    update_traffic=44,
    update=Overlap.AFTER,
    checkpoints=Home.HOST,
    tiles=16,
)

# Layer-to-layer execution (Pudipeddi et al. 2020) moves all of a layer through the device: state
# of 12 bytes both ways, and 16-bit weights for forward and backward.
L2L_TRAFFIC = 12 + 12 + 2 + 2


def efficiency(*, ait: float, bandwidth: float, peak: float) -> float:
    """Share of a device's peak that data movement leaves (ZeRO-Infinity, section 4.1).

    Args:
        ait: Operations per byte that moves.
        bandwidth: Bytes per second.
        peak: Operations per second without movement.

    Example:
        >>> round(efficiency(ait=1024, bandwidth=70e9, peak=70e12), 2)
        0.51
    """
    return ait * bandwidth / (ait * bandwidth + peak)
