"""The configuration that runs: every value decided, frozen, free of pydantic and torch.

`forebay.config.resolve.resolve` makes it; the engine and the trainer read it. It can also be
built by hand: every field has a default, that of a configuration which says nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from forebay.config.exchange import ExchangeSpec
from forebay.config.loads import LoadSpec
from forebay.config.rows import Row, Source
from forebay.config.update_spec import UpdateSpec

if TYPE_CHECKING:
    from forebay.config.leaf import LeafSpec
    from forebay.config.nvme_spec import NvmeSpec
    from forebay.config.zenflow_spec import ZenflowSpec

__all__ = [
    "BatchSpec",
    "BudgetSpec",
    "CheckpointSpec",
    "Dtype",
    "LossScaleSpec",
    "OptimizerSpec",
    "PrecisionSpec",
    "ResolvedConfig",
    "Row",
    "SchedulerSpec",
    "Source",
    "TensorBoardSpec",
    "ZeroSpec",
]

Dtype = Literal["float32", "bfloat16", "float16"]

# DeepSpeed's default, and so what says "units follow the model's blocks".
_SUB_GROUP_DEFAULT: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """Samples per update: `train_batch_size == micro x accumulation_steps x world_size`."""

    train_batch_size: int = 1
    micro_batch_size: int = 1
    accumulation_steps: int = 1
    world_size: int = 1
    order: Literal["microbatch", "layer"] = "microbatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleSpec:
    """The loss scale of float16, in the words of DeepSpeed's `fp16` section.

    Attributes:
        static: A fixed scale, a power of two; None is dynamic.
        initial_scale_power: The first dynamic scale is 2 to this power.
        window: Updates without overflow after which the scale doubles.
        hysteresis: Overflows before it halves.
        consecutive_hysteresis: Whether every good update restores the hysteresis.
        min_scale: A power of two; an overflow at this scale ends training.
    """

    static: float | None = None
    initial_scale_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSpec:
    """Dtypes and what guards them.

    Attributes:
        dtype: Working weights and gradients. Masters, moments and sums are float32.
        loss_scale: For float16; None otherwise.
        check_grad_overflow: Whether a gradient that is not finite skips the whole update.
    """

    dtype: Dtype = "float32"
    loss_scale: LossScaleSpec | None = None
    check_grad_overflow: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """The optimizer to build: `torch.optim.<name>` with these arguments.

    Attributes:
        name: "Adam" (weight decay is L2) or "AdamW" (decoupled).
        lr: Learning rate, before any schedule.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay.
        is_decay_mode_chosen: False for "Adam" without `adam_w_mode`: parameter groups may then
            bring no weight decay of their own, since nobody said which kind.
    """

    name: Literal["Adam", "AdamW"] = "AdamW"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    is_decay_mode_chosen: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec:
    """The schedule to build; see `forebay.optim.schedule`.

    Attributes:
        name: DeepSpeed's name of it.
        params: Every argument with its value, in the order of the reference page. A rate that is
            None is each parameter group's own.
    """

    name: Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"]
    params: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSpec:
    """Sharding and offload.

    Attributes:
        stage: As given, 0 to 3.
        optimizer_tier: Where masters and moments live.
        parameter_tier: Where the working weights live.
        loads: What of the weights is on the device at a time where they come and go.
        pin_memory: Whether to page-lock what is copied.
        ratio: Share of the optimizer state that is updated on the host; None lets the planner
            decide.
        streamed_units: Numbers of the units whose state visits the device, the others updating on
            the host; None lets the planner decide.
        update_cores: Share of the cores that update on the host; None for what was measured.
        unit_elements: Parameters are packed in order into units of at most this many elements,
            at least one parameter each; None: units follow the model's blocks.
        nvme: Files, buffers and access; None unless the tier is nvme.
        zenflow: The mode of that name; None for another one.
        leaf: Modules whose parameters stay in one unit; None names none.
    """

    stage: int = 0
    optimizer_tier: Literal["device", "host", "nvme"] = "device"
    parameter_tier: Literal["device", "host", "nvme"] = "device"
    loads: LoadSpec = field(default_factory=LoadSpec)
    pin_memory: bool = True
    ratio: float | None = None
    streamed_units: tuple[int, ...] | None = None
    update_cores: float | None = None
    unit_elements: int | None = None
    nvme: NvmeSpec | None = None
    zenflow: ZenflowSpec | None = None
    leaf: LeafSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpec:
    """Bytes that forebay may place in each tier; None is what the machine has."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    nvme_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBoardSpec:
    """Scalars for TensorBoard; an empty path is the run's own folder."""

    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """How checkpoints are written.

    Attributes:
        beside_training: Whether training goes on while one is written.
        staging_bytes: Host memory for copies meanwhile; None for as much as there is room for.
        keep: Complete checkpoints that stay; None keeps all.
        shows_statistics: Whether each one's time and bandwidth are logged.
    """

    beside_training: bool = False
    staging_bytes: int | None = None
    keep: int | None = None
    shows_statistics: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """Everything that the configuration decides.

    Attributes:
        batch: Batch sizes.
        precision: Dtypes, loss scale, the finiteness check.
        clip_norm: Largest global gradient norm; None is no clipping.
        optimizer: The optimizer to build; None where the caller brings one.
        scheduler: The schedule to build, or None.
        zero: Sharding and offload.
        update: When updates run and come into force.
        exchange: What happens between ranks.
        keeps_activations_on_host: Whether what checkpointing keeps waits on the host.
        budgets: Bytes per tier.
        synchronous: Whether `step()` waits for the whole update.
        rank_timeout: Seconds that ranks wait for each other.
        profile: File with the machine's measured speeds; None plans with typical ones.
        steps_per_print: Updates between two progress lines; None prints none.
        wall_clock_breakdown: Whether to print where each step's time went.
        dataloader_drop_last: Whether a loader made here drops an incomplete last batch.
        tensorboard: Where scalars go, or None.
        checkpoint: How checkpoints are written.
        rows: What `describe` returns; no part of the value.
    """

    batch: BatchSpec = BatchSpec()
    precision: PrecisionSpec = PrecisionSpec()
    clip_norm: float | None = 1.0
    optimizer: OptimizerSpec | None = None
    scheduler: SchedulerSpec | None = None
    zero: ZeroSpec = ZeroSpec()
    update: UpdateSpec = field(default_factory=UpdateSpec)
    exchange: ExchangeSpec = field(default_factory=ExchangeSpec)
    keeps_activations_on_host: bool = False
    budgets: BudgetSpec = BudgetSpec()
    synchronous: bool = False
    rank_timeout: int = 24
    profile: str | None = None
    steps_per_print: int | None = None
    wall_clock_breakdown: bool = False
    dataloader_drop_last: bool = False
    tensorboard: TensorBoardSpec | None = None
    checkpoint: CheckpointSpec = CheckpointSpec()
    rows: tuple[Row, ...] = field(default=(), compare=False, repr=False)

    def describe(self) -> list[Row]:
        """Every key that acts, and every key that was given and changes nothing."""
        return list(self.rows)

    def table(self) -> str:
        """`describe` as aligned plain text, one row a line."""
        rows = [("key", "value", "from", "note")]
        rows += [(row.path, row.value, row.source.value, row.note) for row in self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]
            ).rstrip()
            for row in rows
        )

    def as_dict(self) -> dict[str, Any]:
        """The configuration with every value written out, in DeepSpeed's shape.

        Resolving it gives an equal `ResolvedConfig`.
        """
        config: dict[str, Any] = {
            "train_batch_size": self.batch.train_batch_size,
            "train_micro_batch_size_per_gpu": self.batch.micro_batch_size,
            "gradient_accumulation_steps": self.batch.accumulation_steps,
            "gradient_clipping": 0.0 if self.clip_norm is None else self.clip_norm,
            "steps_per_print": self.steps_per_print,
            "wall_clock_breakdown": self.wall_clock_breakdown,
            "dataloader_drop_last": self.dataloader_drop_last,
            **_precision_dict(self.precision),
            **self.exchange.top_keys(),
        }
        if self.optimizer is not None:
            config["optimizer"] = _optimizer_dict(self.optimizer)
        if self.scheduler is not None:
            params = {name: value for name, value in self.scheduler.params if value is not None}
            config["scheduler"] = {"type": self.scheduler.name, "params": params}
        config["zero_optimization"] = _zero_dict(self.zero) | self.exchange.zero_keys()
        if self.zero.nvme is not None:
            config["aio"] = self.zero.nvme.aio.as_dict()
        if self.tensorboard is not None:
            config["tensorboard"] = {
                "enabled": True,
                "output_path": self.tensorboard.output_path,
                "job_name": self.tensorboard.job_name,
            }
        config["checkpoint"] = {
            "writer": {
                "decoupled": self.checkpoint.beside_training,
                "show_statistics": self.checkpoint.shows_statistics,
            }
        }
        config["activation_checkpointing"] = {"cpu_checkpointing": self.keeps_activations_on_host}
        config["forebay"] = {
            "device_budget": self.budgets.device_bytes,
            "host_budget": self.budgets.host_bytes,
            "nvme_budget": self.budgets.nvme_bytes,
            **self.update.own_keys(),
            "state_format": "fp32",
            "accumulation_order": self.batch.order,
            "reduction": self.exchange.reduction,
            "synchronous": self.synchronous,
            "rank_timeout": self.rank_timeout,
            "profile": self.profile,
            "streamed_units": self.zero.streamed_units and [*self.zero.streamed_units],
            "keep_checkpoints": self.checkpoint.keep,
            "checkpoint_staging": self.checkpoint.staging_bytes,
        }
        return config

    def as_json(self) -> str:
        """`as_dict` as JSON text, to be saved with the run."""
        return json.dumps(self.as_dict(), indent=2) + "\n"


def _precision_dict(precision: PrecisionSpec) -> dict[str, Any]:
    bf16: dict[str, Any] = {"enabled": precision.dtype == "bfloat16"}
    fp16: dict[str, Any] = {"enabled": precision.dtype == "float16"}
    if precision.dtype == "bfloat16":
        bf16["check_grad_overflow"] = precision.check_grad_overflow
    scale = precision.loss_scale
    if scale is not None:
        fp16 |= {
            "loss_scale": 0.0 if scale.static is None else scale.static,
            "initial_scale_power": scale.initial_scale_power,
            "loss_scale_window": scale.window,
            "hysteresis": scale.hysteresis,
            "consecutive_hysteresis": scale.consecutive_hysteresis,
            "min_loss_scale": scale.min_scale,
        }
    return {"bf16": bf16, "fp16": fp16, "data_types": {"grad_accum_dtype": "fp32"}}


def _optimizer_dict(optimizer: OptimizerSpec) -> dict[str, Any]:
    params = {
        "lr": optimizer.lr,
        "betas": list(optimizer.betas),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }
    if optimizer.is_decay_mode_chosen:
        params["adam_w_mode"] = optimizer.name == "AdamW"
    return {"type": optimizer.name, "params": params}


def _zero_dict(zero: ZeroSpec) -> dict[str, Any]:
    param: dict[str, Any] = {"device": "none"}
    if zero.parameter_tier != "device":
        param = {"device": "cpu", "pin_memory": zero.pin_memory}
    if zero.nvme is not None and zero.nvme.weights is not None:
        param |= {"device": "nvme", **zero.nvme.weights.as_dict()}
    return {
        "stage": zero.stage,
        "sub_group_size": zero.unit_elements or _SUB_GROUP_DEFAULT,
        "offload_optimizer": {
            "device": {"device": "none", "host": "cpu", "nvme": "nvme"}[zero.optimizer_tier],
            "pin_memory": zero.pin_memory,
            "ratio": zero.ratio,
            "cpuadam_cores_perc": zero.update_cores,
            **({} if zero.nvme is None else zero.nvme.as_dict()),
        },
        "offload_param": param,
        **({} if zero.zenflow is None else {"zenflow": zero.zenflow.as_dict()}),
        **({} if zero.leaf is None else {"leaf_module": zero.leaf.as_dict()}),
        **zero.loads.as_dict(),
    }
