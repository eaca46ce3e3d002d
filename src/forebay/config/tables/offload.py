"""Rows of what leaves the device: the two offload sections, `zenflow` and `aio`."""

from __future__ import annotations

from typing import Final

from forebay.config.keys import Auto, Key, hint, honoured, section
from forebay.config.kinds import (
    COUNT,
    ELEMENTS,
    FLAG,
    FOLDERS,
    PART,
    POSITIVE,
    SECTORS,
    SHARE,
    STATE_ELEMENTS,
    Kind,
    bounded_integer,
    choice,
    optional,
    or_auto,
)

__all__ = ["KEYS"]

_NVME_ONLY: Final = "it acts with device nvme only"
# io_uring takes 32,768 entries.
_DEPTH: Final = Kind(name="an integer from 1 to 128", check=bounded_integer(1, 128))
_DEVICES: Final = optional(choice("none", "cpu", "nvme"))

_OFFLOAD: Final[tuple[Key, ...]] = (
    section("zero_optimization.offload_optimizer", "Where master weights and moments live."),
    honoured(
        "zero_optimization.offload_optimizer.device",
        _DEVICES,
        "none: on the device; cpu: in host memory; nvme: in files.",
        default="none",
    ),
    honoured(
        "zero_optimization.offload_optimizer.pin_memory",
        FLAG,
        "Page-lock what is copied; where the system refuses, training goes on with pageable "
        "memory and says so.",
        default=True,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "zero_optimization.offload_optimizer.ratio",
        optional(SHARE),
        "Share of the optimizer state, in bytes to the nearest unit, that is updated on the host; "
        'the rest stays on the device. Left out or `"auto"`, the planner decides.',
        default=None,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "zero_optimization.offload_optimizer.super_offload",
        FLAG,
        "Update on the host during backward, before the norm is known (forebay.update: "
        "speculative), with the same bits. Needs stage 3 and device cpu.",
        default=False,
    ),
    honoured(
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        optional(SHARE),
        "Share of this process's cores that update on the host, at least one and never the one "
        'that launches kernels. Left out or `"auto"`: as many as the profile measured to be '
        "enough, else all but that one.",
        default=None,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "zero_optimization.offload_optimizer.nvme_path",
        optional(FOLDERS),
        "Folder for the files, on a local drive; several folders are one striped space.",
        default=None,
    ),
    honoured(
        "zero_optimization.offload_optimizer.buffer_count",
        POSITIVE,
        "Pieces of state that are in host memory at once. They come and go through four of "
        "them, or half of more; the others hold the first pieces, which stay there.",
        default=4,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "zero_optimization.offload_optimizer.buffer_size",
        optional(STATE_ELEMENTS),
        "Elements of a piece, rounded down to a multiple of 65,536 (at least one); null is what "
        "the host budget (without one, the machine) allows, at most 4 Mi.",
        default=None,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "zero_optimization.offload_optimizer.pipeline_read",
        FLAG,
        "Read pieces while others are updated, the first ones during backward. DeepSpeed's "
        "default is false.",
        default=True,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "zero_optimization.offload_optimizer.pipeline_write",
        FLAG,
        "Go on before a piece is written back; writes drain through the next step. DeepSpeed's "
        "default is false.",
        default=True,
        auto=Auto.DEFAULT,
    ),
    hint(
        "zero_optimization.offload_optimizer.fast_init",
        FLAG,
        "Make the first master weights from files of parameters.",
        default=False,
        reason="masters are made once, from the weights",
    ),
    section("zero_optimization.offload_param", "Where the working weights live; stage 3 only."),
    honoured(
        "zero_optimization.offload_param.device",
        _DEVICES,
        "none: on the device; cpu: in host memory, from where each pass brings them up; nvme: in "
        "files. Optimizer state must not be on the device; where it is in host memory, so are the "
        "weights.",
        default="none",
    ),
    honoured(
        "zero_optimization.offload_param.pin_memory",
        FLAG,
        "Page-lock the weights; one policy locks all that is copied, so it must not differ from "
        "`offload_optimizer.pin_memory`.",
        default=True,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "zero_optimization.offload_param.nvme_path",
        optional(FOLDERS),
        "As `offload_optimizer.nvme_path`, whose files hold the weights too; left out, those.",
        default=None,
    ),
    honoured(
        "zero_optimization.offload_param.buffer_count",
        POSITIVE,
        "Pieces of weights that are in host memory at once, on their way to the device.",
        default=5,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "zero_optimization.offload_param.buffer_size",
        optional(ELEMENTS),
        "Elements of a piece, at most one of state, rounded down to a multiple of 65,536 (at least "
        "one); null is what the host budget (without one, the machine) allows, at most 4 Mi. "
        "DeepSpeed's default is 1e8.",
        default=None,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "zero_optimization.offload_param.max_in_cpu",
        ELEMENTS,
        "Elements of weights that stay in host memory with device nvme, the forward's first ones, "
        "as far as the host budget has room.",
        default=1_000_000_000,
        auto=Auto.DEFAULT,
    ),
)

_ZENFLOW: Final[tuple[Key, ...]] = (
    section(
        "zero_optimization.zenflow",
        "Important columns every step on the device, the rest every few steps. Stages 1 to 3, with "
        "offload_optimizer.device cpu. Steps here are updates: gradient_accumulation_steps stays.",
    ),
    honoured(
        "zero_optimization.zenflow.topk_ratio",
        PART,
        "Share of each parameter's columns that are important: those with the largest gradients.",
        default=0.1,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "zero_optimization.zenflow.select_strategy",
        choice("auto", "step", "epoch"),
        "What `select_interval` counts. auto: each epoch, where its steps are known, else every "
        "100 updates.",
        default="auto",
        auto=Auto.LITERAL,
    ),
    honoured(
        "zero_optimization.zenflow.select_interval",
        or_auto(POSITIVE),
        "Updates or epochs between two choices of columns; auto with strategy auto, or one epoch.",
        default="auto",
        auto=Auto.LITERAL,
    ),
    honoured(
        "zero_optimization.zenflow.update_interval",
        or_auto(POSITIVE),
        "Updates of important columns to one of the rest; auto: when the rest has gathered as much "
        "as important columns get in one.",
        default="auto",
        auto=Auto.LITERAL,
    ),
    honoured(
        "zero_optimization.zenflow.full_warm_up_rounds",
        COUNT,
        "Updates at the start that update all.",
        default=0,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "zero_optimization.zenflow.overlap_step",
        FLAG,
        "Update the rest beside the following interval; it comes into force at its end.",
        default=False,
    ),
    honoured(
        "zero_optimization.zenflow.offload",
        FLAG,
        "Keep the important columns' state in host memory between updates.",
        default=False,
    ),
    honoured(
        "zero_optimization.zenflow.auto_ratio",
        SHARE,
        "Share of the parameters whose rest must have gathered enough, with update_interval auto.",
        default=0.99,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "zero_optimization.zenflow.steps_per_epoch",
        optional(POSITIVE),
        "Updates of an epoch; known where the trainer or `initialize` has the data.",
        default=None,
        auto=Auto.DEFAULT,
    ),
    hint(
        "zero_optimization.zenflow.pt_reserved_cores_perc",
        SHARE,
        "Share of the cores kept for torch.",
        default=0.5,
        reason="offload_optimizer.cpuadam_cores_perc says which cores update",
    ),
)

_AIO: Final[tuple[Key, ...]] = (
    section("aio", "Asynchronous file access."),
    honoured(
        "aio.block_size",
        SECTORS,
        "Bytes per request.",
        default=1 << 20,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "aio.queue_depth",
        _DEPTH,
        "Requests in flight, for each of `intra_op_parallelism`.",
        default=8,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "aio.intra_op_parallelism",
        _DEPTH,
        "What the queue depth is multiplied by: requests of one file are spread as they come.",
        default=1,
        auto=Auto.DEFAULT,
        aliases=("thread_count",),
    ),
    honoured(
        "aio.single_submit",
        FLAG,
        "Hand requests to the system one at a time.",
        default=False,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "aio.overlap_events",
        FLAG,
        "Submit while others complete, instead of a queueful at a time.",
        default=True,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "aio.use_gds",
        optional(FLAG),
        "Whether weights in files go to the device by GPUDirect Storage, whose bytes are not "
        "compared with checksums; null and true: where the machine has it. DeepSpeed's default is "
        "false.",
        default=None,
        auto=Auto.DEFAULT,
    ),
)

KEYS: Final[tuple[Key, ...]] = (*_OFFLOAD, *_ZENFLOW, *_AIO)
