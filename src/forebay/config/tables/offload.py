"""Rows of what leaves the device: the two offload sections, `zenflow` and `aio`."""

from __future__ import annotations

from typing import Final

from forebay.config.keys import NOT_YET, Auto, Key, hint, honoured, moot, refused, section
from forebay.config.kinds import (
    COUNT,
    ELEMENTS,
    FLAG,
    POSITIVE,
    SHARE,
    TEXT,
    choice,
    optional,
)

__all__ = ["KEYS"]

_NVME_ONLY: Final = "it acts with device nvme only"
_WITH_SECTION: Final = "it acts with its section only"
_DEVICES: Final = optional(choice("none", "cpu", "nvme"))

_OFFLOAD: Final[tuple[Key, ...]] = (
    section("zero_optimization.offload_optimizer", "Where master weights and moments live."),
    honoured(
        "zero_optimization.offload_optimizer.device",
        _DEVICES,
        "none: on the device; cpu: in host memory; nvme: in files.",
        default="none",
        accepts=(None, "none", "cpu"),
        reason=NOT_YET,
        instead='write "cpu" or "none"',
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
        "the rest stays on the device. Left out, the planner decides.",
        default=None,
    ),
    refused(
        "zero_optimization.offload_optimizer.super_offload",
        FLAG,
        "Update during backward, before the norm is known, and undo if need be. Needs stage 3 "
        "and device cpu.",
        default=False,
    ),
    honoured(
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        optional(SHARE),
        "Share of this process's cores that update on the host, at least one and never the one "
        "that launches kernels. Left out: as many as the profile measured to be enough, else all "
        "but that one.",
        default=None,
    ),
    *moot(
        "zero_optimization.offload_optimizer",
        reason=_NVME_ONLY,
        rows={
            "nvme_path": (optional(TEXT), None, "Folder for the files."),
            "buffer_count": (POSITIVE, 4, "Buffers between files and host memory."),
            "buffer_size": (ELEMENTS, None, "Their size; DeepSpeed has dropped the key."),
            "pipeline_read": (FLAG, False, "Read ahead while a unit is updated."),
            "pipeline_write": (FLAG, False, "Write behind while the next unit is updated."),
            "fast_init": (FLAG, False, "Make the first master weights from files of parameters."),
        },
    ),
    section("zero_optimization.offload_param", "Where the working weights live; stage 3 only."),
    honoured(
        "zero_optimization.offload_param.device",
        _DEVICES,
        "none: on the device; cpu: in host memory, from where each pass brings them up; nvme: in "
        "files. Optimizer state must live on the host too.",
        default="none",
        accepts=(None, "none", "cpu"),
        reason=NOT_YET,
        instead='write "cpu" or "none"',
    ),
    honoured(
        "zero_optimization.offload_param.pin_memory",
        FLAG,
        "Page-lock the weights; one policy locks all that is copied, so it must not differ from "
        "`offload_optimizer.pin_memory`.",
        default=True,
        auto=Auto.DEFAULT,
    ),
    *moot(
        "zero_optimization.offload_param",
        reason=_NVME_ONLY,
        rows={
            "nvme_path": (optional(TEXT), None, "Folder for the files."),
            "buffer_count": (POSITIVE, 5, "Buffers between files and host memory."),
            "buffer_size": (ELEMENTS, 100_000_000, "Size of such a buffer."),
            "max_in_cpu": (ELEMENTS, 1_000_000_000, "Elements kept in memory with device nvme."),
        },
    ),
)

_ZENFLOW: Final[tuple[Key, ...]] = (
    section(
        "zero_optimization.zenflow",
        "Important columns every step on the device, the rest every few steps.",
        reason=NOT_YET,
    ),
    hint(
        "zero_optimization.zenflow.select_strategy",
        choice("auto", "step", "epoch"),
        "When important columns are chosen anew.",
        default="auto",
        reason=_WITH_SECTION,
        auto=Auto.LITERAL,
    ),
    *moot(
        "zero_optimization.zenflow",
        reason=_WITH_SECTION,
        rows={
            "topk_ratio": (SHARE, 0.1, "Share of the columns that are important."),
            "select_interval": (POSITIVE, None, "Steps or epochs between two choices."),
            "update_interval": (POSITIVE, None, "Steps between two updates of the rest."),
            "overlap_step": (FLAG, False, "Update the rest beside training."),
            "offload": (FLAG, False, "Keep the important columns' state on the host."),
            "auto_ratio": (SHARE, 0.99, "Threshold for the next choice."),
            "full_warm_up_rounds": (COUNT, 0, "Steps that update all at the start."),
            "pt_reserved_cores_perc": (SHARE, 0.5, "Share of the cores kept for torch."),
            "steps_per_epoch": (optional(POSITIVE), None, "Set by the engine."),
        },
    ),
)

_AIO: Final[tuple[Key, ...]] = (
    section("aio", "Asynchronous file access."),
    *moot(
        "aio",
        reason=_NVME_ONLY,
        rows={
            "block_size": (POSITIVE, 1 << 20, "Bytes per request."),
            "queue_depth": (POSITIVE, 8, "Requests in flight."),
            "single_submit": (FLAG, False, "Submit one request at a time."),
            "overlap_events": (FLAG, True, "Submit while others complete."),
            "use_gds": (FLAG, False, "Copy between device and drive directly."),
        },
    ),
    hint(
        "aio.intra_op_parallelism",
        POSITIVE,
        "Threads that share one file.",
        default=1,
        reason=_NVME_ONLY,
        aliases=("thread_count",),
    ),
)

KEYS: Final[tuple[Key, ...]] = (*_OFFLOAD, *_ZENFLOW, *_AIO)
