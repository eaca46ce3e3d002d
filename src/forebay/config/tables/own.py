"""Rows of the section `forebay`: what DeepSpeed has no key for."""

from __future__ import annotations

from typing import Final

from forebay.config.keys import NOT_YET, Auto, Key, honoured, section
from forebay.config.kinds import COUNT, FLAG, NUMBERS, POSITIVE, SIZE, TEXT, choice, optional
from forebay.config.update_spec import WARM_UP_STEPS

__all__ = ["KEYS"]

KEYS: Final[tuple[Key, ...]] = (
    section("forebay", "forebay's own settings."),
    honoured(
        "forebay.device_budget",
        optional(SIZE),
        "Device memory that forebay may place bytes in; null is what the device has.",
        default=None,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "forebay.host_budget",
        optional(SIZE),
        "Host memory that forebay may place bytes in, on a machine with several ranks by all of "
        "them together; null is what the machine has to spare.",
        default=None,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "forebay.nvme_budget",
        optional(SIZE),
        "Room on the drives that forebay may place bytes in; null is what they have left.",
        default=None,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "forebay.update",
        choice("exact", "speculative", "delayed", "zenflow"),
        "When updates run. exact: when the norm of all gradients is known. speculative: during "
        "backward, into a second state, with the same bits; what super_offload asks for. delayed: "
        "beside the whole next step, so that weights are one update behind. zenflow: see "
        "zero_optimization.zenflow.",
        default="exact",
    ),
    honoured(
        "forebay.warm_up_steps",
        COUNT,
        "Updates at the start that are exact, with update delayed.",
        default=WARM_UP_STEPS,
    ),
    honoured(
        "forebay.state_format",
        choice("fp32", "bf16_moments", "int8_moments"),
        "Format of master weights and moments.",
        default="fp32",
        accepts=("fp32",),
        reason=NOT_YET,
    ),
    honoured(
        "forebay.accumulation_order",
        choice("microbatch", "layer"),
        "microbatch: each goes through the whole model; layer: all go through one block at a "
        "time, with the same bits (engine.train_batch).",
        default="microbatch",
    ),
    honoured(
        "forebay.reduction",
        choice("ranked", "library"),
        "How gradients add up over ranks. ranked: in fp32, in the order of ranks, so that stages "
        "agree to the bit; library: by the reduce-scatter of NCCL or gloo, in the type in which "
        "they travel.",
        default="ranked",
    ),
    honoured(
        "forebay.keep_checkpoints",
        optional(POSITIVE),
        "Complete checkpoints that stay in a folder, the newest; null keeps all.",
        default=None,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "forebay.checkpoint_staging",
        optional(SIZE),
        "Host memory for copies of the state while a checkpoint is written beside training "
        "(checkpoint.writer.decoupled); null is as much as there is room for.",
        default=None,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "forebay.rank_timeout",
        POSITIVE,
        "Seconds that ranks may come later than others to a backward, step or save; then the run "
        "ends with an error that names the late ones.",
        default=24,
    ),
    honoured(
        "forebay.synchronous",
        FLAG,
        "Finish every update within step(), with the same bits; for finding faults.",
        default=False,
    ),
    honoured(
        "forebay.profile",
        optional(TEXT),
        "File with the machine's measured speeds, written by `forebay probe`; null plans with "
        "typical ones.",
        default=None,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "forebay.streamed_units",
        optional(NUMBERS),
        "Numbers of the units, from 0 in the model's order, whose optimizer state visits the "
        "device for its update; the others are updated on the host. Written by `forebay plan "
        "--config`; null lets the engine choose by the profile.",
        default=None,
        auto=Auto.DEFAULT,
    ),
)
