"""What bounds a step, in one sentence, and what would help.

It judges by the waits that the compute stream was seen to make, not by a model of the machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.plan.timeline import Row

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["verdict"]

# Less than a twentieth is not worth a change of plan.
_WORTH = 0.05

_BOUNDS = {
    Row.HOST_UPDATE: (
        "the update on the host",
        "more device memory for state (so that more units update on the device), more cores, or "
        "more tokens per update",
    ),
    Row.UP: (
        "the link to the device",
        "more tokens per update, or fewer bytes that move (state that stays on the device)",
    ),
    Row.READ: (
        "reading state from files",
        "more host memory for state (forebay.host_budget), another drive in nvme_path, or more "
        "tokens per update",
    ),
    Row.WRITE: (
        "writing state to files",
        "more host memory for state (forebay.host_budget), another drive in nvme_path, or more "
        "tokens per update",
    ),
    Row.DOWN: (
        "the link to the host",
        "more tokens per update, or gradients that stay on the device (state that is there)",
    ),
}


def verdict(*, step: float, exposed: float, on: Mapping[Row, float]) -> str:
    """The sentence.

    Args:
        step: Seconds of the step.
        exposed: Seconds that the compute stream stood still.
        on: Of these, seconds in which each lane worked; lanes overlap.
    """
    share = exposed / step if step > 0 else 0.0
    if share < _WORTH:
        return (
            f"Computation bounds the step: {share:.0%} of it is spent waiting. A faster device or "
            "less recomputation would help; less offload would not."
        )
    row = max(on, key=lambda one: on[one])
    if on[row] < exposed / 2:
        return (
            f"Waiting takes {share:.0%} of the step, but no lane worked meanwhile: the host "
            "enqueues too late. A quieter machine, larger batches or fewer, larger units help."
        )
    what, help_ = _BOUNDS[row]
    return (
        f"Waiting takes {share:.0%} of the step ({exposed * 1e3:.0f} of {step * 1e3:.0f} ms), "
        f"{on[row] / exposed:.0%} of that for {what}. What would help: {help_}."
    )
