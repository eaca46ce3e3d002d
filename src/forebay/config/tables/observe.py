"""Rows of what watches a run: timers, profiler, monitors."""

from __future__ import annotations

from typing import Final

from forebay.config.keys import Key, honoured, moot, opaque, refused, section
from forebay.config.kinds import FLAG, INTEGER, NUMBER, POSITIVE, TEXT, optional

__all__ = ["KEYS"]

_MONITOR: Final = 'write "tensorboard": {"enabled": true}, or leave the section out'

_TIMERS: Final[tuple[Key, ...]] = (
    honoured(
        "wall_clock_breakdown",
        FLAG,
        "Print the time of each phase of a step, without waiting for the device.",
        default=False,
    ),
    refused("memory_breakdown", FLAG, "Print memory at each phase of a step.", default=False),
    section("timers", "Timing of every step."),
    section("timers.throughput", "Samples per second."),
    *moot(
        "timers.throughput",
        reason="throughput is measured without waiting for the device",
        rows={
            "enabled": (FLAG, True, "Measure."),
            "synchronized": (FLAG, True, "Wait for the device at each measurement."),
        },
    ),
    section("flops_profiler", "Operations and time by module."),
    refused("flops_profiler.enabled", FLAG, "Profile one step.", default=False),
    *moot(
        "flops_profiler",
        reason="it acts with flops_profiler.enabled only",
        rows={
            "recompute_fwd_factor": (NUMBER, 0.0, "Share of forward that is run again."),
            "profile_step": (POSITIVE, 1, "Which step."),
            "module_depth": (INTEGER, -1, "Depth of the report."),
            "top_modules": (POSITIVE, 1, "Modules listed."),
            "detailed": (FLAG, True, "Print every module."),
            "output_file": (optional(TEXT), None, "Where to."),
        },
    ),
    opaque(
        "comms_logger",
        "Log every collective.",
        reason="collectives are not logged",
        instead="delete comms_logger; wall_clock_breakdown shows the time of exchanges, "
        "torch.profiler each one",
    ),
)

_MONITORS: Final[tuple[Key, ...]] = (
    section("tensorboard", "Scalars of every update for TensorBoard."),
    honoured("tensorboard.enabled", FLAG, "Write them.", default=False),
    honoured(
        "tensorboard.output_path",
        TEXT,
        "Folder; empty is the run's own (`forebay train`) or `runs` (`initialize`).",
        default="",
    ),
    honoured(
        "tensorboard.job_name", TEXT, "Folder within that folder.", default="DeepSpeedJobName"
    ),
    section("csv_monitor", "Scalars as CSV files."),
    refused(
        "csv_monitor.enabled",
        FLAG,
        "Write them. `forebay train` writes its metrics as JSON lines.",
        default=False,
        instead=_MONITOR,
    ),
    *moot(
        "csv_monitor",
        reason="it acts with csv_monitor.enabled only",
        rows={
            "output_path": (TEXT, "", "Folder."),
            "job_name": (TEXT, "DeepSpeedJobName", "Folder within that folder."),
        },
    ),
    section("wandb", "Weights & Biases."),
    refused("wandb.enabled", FLAG, "Send scalars there.", default=False, instead=_MONITOR),
    *moot(
        "wandb",
        reason="it acts with wandb.enabled only",
        rows={
            "group": (optional(TEXT), None, "Group."),
            "team": (optional(TEXT), None, "Team."),
            "project": (optional(TEXT), "deepspeed", "Project."),
        },
    ),
    section("comet", "Comet."),
    refused("comet.enabled", FLAG, "Send scalars there.", default=False, instead=_MONITOR),
    *moot(
        "comet",
        reason="it acts with comet.enabled only",
        rows={
            "samples_log_interval": (POSITIVE, 100, "Samples between two reports."),
            "project": (optional(TEXT), None, "Project."),
            "workspace": (optional(TEXT), None, "Workspace."),
            "api_key": (optional(TEXT), None, "Key."),
            "experiment_name": (optional(TEXT), None, "Experiment."),
            "experiment_key": (optional(TEXT), None, "Its key."),
            "online": (optional(FLAG), None, "Send at once."),
            "mode": (optional(TEXT), None, "Whether to go on with an old experiment."),
        },
    ),
)

KEYS: Final[tuple[Key, ...]] = (*_TIMERS, *_MONITORS)
