"""The least time that a step can take on a machine, from ceilings measured in the same run.

[Note: the floor] The clip factor is known when backward has ended. Until the last weight is new,
z parameters are updated on the host and y on the device, with their state on its way home; the
next forward runs meanwhile. With split masters, 26 bytes of the pass and 2 of the weight's copy,

    step = backwards + forwards but the first + max(first forward, w + tail)
    w = max((28 z + 10 y) / D, 10 y / B_down, 2 z / B_up)

where D is what update and copies reach of host memory together, and the tail what must still be
computed when the last weight is there. State comes up during the last backward, into memory that
activations leave: 10 y <= min(B_up * backward, staging).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.plan.solve import Rates

__all__ = ["Floor", "floor_of"]

# bf16 weights with split masters.
_HOST_BYTES = 28
_STATE_BYTES = 10
_WEIGHT_BYTES = 2
# Steps of the search over the streamed share: 0.1% of the model.
_SHARES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The floor and how it is reached.

    Attributes:
        seconds: Of one step.
        window_seconds: From the clip factor to the last new weight.
        streamed_share: Share of all parameters whose state visits the device.
    """

    seconds: float
    window_seconds: float
    streamed_share: float


def floor_of(  # noqa: PLR0913 - the quantities of the formula
    *,
    parameters: int,
    forward: float,
    backward: float,
    rates: Rates,
    resident_share: float = 0.0,
    micro_batches: int = 1,
    staging_bytes: float = math.inf,
    tail: float = 0.0,
) -> Floor:
    """The floor of a step; see [Note: the floor].

    Args:
        parameters: Trained parameters, bf16 weights.
        forward: Seconds of one micro-batch's forward alone.
        backward: Seconds of its backward, recomputation included.
        rates: Ceilings of this machine.
        resident_share: Share of the state that stays on the device.
        micro_batches: Per update.
        staging_bytes: Device memory for state that visits.
        tail: Seconds of the next forward that must follow the last weight.
    """
    moving = parameters * (1.0 - resident_share)
    most = min(moving, rates.link_up * backward / _STATE_BYTES, staging_bytes / _STATE_BYTES)
    best = None
    for step in range(_SHARES + 1):
        streamed = most * step / _SHARES
        on_host = moving - streamed
        window = max(
            (_HOST_BYTES * on_host + _STATE_BYTES * streamed) / rates.host_memory,
            _STATE_BYTES * streamed / rates.link_down,
            _WEIGHT_BYTES * on_host / rates.link_up,
        )
        if best is None or window < best[0]:
            best = (window, streamed)
    assert best is not None
    window, streamed = best
    others = micro_batches * (forward + backward) - forward
    return Floor(
        seconds=others + max(forward, window + tail if window else 0.0),
        window_seconds=window,
        streamed_share=streamed / parameters if parameters else 0.0,
    )
