"""Rows of `zero_optimization` itself: stage, units, communication, parameters of stage 3."""

from __future__ import annotations

from typing import Final

from forebay.config.keys import NOT_YET, Auto, Key, hint, honoured, moot, refused, section
from forebay.config.kinds import (
    COUNT,
    ELEMENTS,
    FLAG,
    INTEGER,
    NUMBER,
    POSITIVE,
    TEXTS,
    choice,
    optional,
)

__all__ = ["KEYS"]

_EXCHANGED: Final = "gradients and weights are exchanged unit by unit, at every stage alike"
_EQUAL: Final = "each rank copies and updates an equal slice of every unit"
_BY_UNIT: Final = "weights come and go by whole units, in the recorded order, as there is room"
_UNLESS: Final = "The default says nothing."
_NO_BUCKETS: Final = "gradients leave unit by unit, in pieces that the plan sizes"
_WITH_SECTION: Final = "it acts with its section only"

_STAGE: Final[tuple[Key, ...]] = (
    section("zero_optimization", "What is sharded and offloaded. true is stage 1, false stage 0."),
    honoured(
        "zero_optimization.stage",
        choice(0, 1, 2, 3),
        "0: nothing is sharded; 1: optimizer state; 2: gradients too; 3: parameters too. In one "
        "process all four place the same bytes.",
        default=0,
    ),
    honoured(
        "zero_optimization.sub_group_size",
        ELEMENTS,
        "Parameters are packed in order into units of at most this many elements, at least one "
        "parameter each. The default says nothing: units follow the model's blocks.",
        default=1_000_000_000,
        auto=Auto.DEFAULT,
    ),
    honoured(
        "zero_optimization.cpu_offload",
        FLAG,
        "Old form of `offload_optimizer.device: cpu`.",
        default=False,
    ),
    honoured(
        "zero_optimization.cpu_offload_param",
        FLAG,
        "Old form of `offload_param.device: cpu`.",
        default=False,
    ),
    honoured(
        "zero_optimization.cpu_offload_use_pin_memory",
        FLAG,
        "Old form of `offload_optimizer.pin_memory`.",
        default=True,
    ),
)

_COMMUNICATION: Final[tuple[Key, ...]] = (
    *moot(
        "zero_optimization",
        reason=_NO_BUCKETS,
        rows={
            "contiguous_gradients": (FLAG, True, "Pack gradients into one buffer."),
            "reduce_bucket_size": (ELEMENTS, 500_000_000, "Size of that buffer."),
            "overlap_comm": (optional(FLAG), None, "Reduce gradients while backward runs."),
        },
    ),
    *moot(
        "zero_optimization",
        reason=_EXCHANGED,
        rows={
            "reduce_scatter": (FLAG, True, "Reduce each gradient to its owner only."),
            "use_multi_rank_bucket_allreduce": (FLAG, True, "Reduce for several ranks at once."),
            "allgather_partitions": (FLAG, True, "Collect updated weights by all-gather."),
            "allgather_bucket_size": (ELEMENTS, 500_000_000, "Elements per all-gather."),
        },
    ),
    *moot(
        "zero_optimization",
        reason=_EQUAL,
        rows={
            "round_robin_gradients": (FLAG, False, "Deal the gradients out over ranks in turn."),
        },
    ),
    refused(
        "zero_optimization.ignore_unused_parameters",
        FLAG,
        "false ends training at a parameter that got no gradient. Here such a parameter is "
        "skipped, as torch.optim does.",
        default=True,
    ),
    refused(
        "zero_optimization.legacy_stage1",
        FLAG,
        "An implementation that DeepSpeed removed.",
        default=False,
        reason="DeepSpeed has removed it too",
    ),
    refused(
        "zero_optimization.zero_hpz_partition_size",
        POSITIVE,
        "Ranks that share a second copy of the weights, from which backward gathers (ZeRO++).",
        default=1,
        reason="weights and optimizer state are sharded over the same ranks",
        instead="write zero_optimization.mics_shard_size with the same number, or pass "
        "initialize(mesh_param=init_device_mesh(kind, (copies, that number))): weights are then "
        "gathered within so many ranks, at the same bits, and so many hold all optimizer state",
    ),
    refused(
        "zero_optimization.zero_quantized_weights",
        FLAG,
        "Gather int8 weights (ZeRO++).",
        default=False,
    ),
    refused(
        "zero_optimization.zero_quantized_nontrainable_weights",
        FLAG,
        "The same for frozen weights.",
        default=False,
    ),
    refused(
        "zero_optimization.zero_quantized_gradients",
        FLAG,
        "Exchange 4-bit gradients (ZeRO++).",
        default=False,
    ),
    section(
        "zero_optimization.zeropp_loco_param",
        "Error feedback for quantized gradients.",
        reason=NOT_YET,
    ),
    *moot(
        "zero_optimization.zeropp_loco_param",
        reason=_WITH_SECTION,
        rows={
            "err_beta": (NUMBER, 0.8, "Weight of the old error."),
            "reset_T": (POSITIVE, 1024, "Steps between two resets."),
        },
    ),
    honoured(
        "zero_optimization.mics_shard_size",
        INTEGER,
        "Hybrid sharding: ranks that share one copy of what the stage shards, counted from rank 0 "
        "on, those of a machine for example; every other group of as many has its copy too. -1 is "
        "all ranks.",
        default=-1,
        auto=Auto.DEFAULT,
    ),
    refused(
        "zero_optimization.mics_hierarchical_params_gather",
        FLAG,
        "Gather within a node first.",
        default=False,
    ),
)

_STAGE3: Final[tuple[Key, ...]] = (
    *(
        hint(
            f"zero_optimization.stage3_{name}",
            kind,
            meaning,
            default=default,
            reason=_BY_UNIT,
            aliases=(name,),
        )
        for name, kind, default, meaning in (
            ("module_granularity_threshold", COUNT, 0, "Gather small modules as one."),
            ("use_all_reduce_for_fetch_params", FLAG, False, "Gather by all-reduce."),
            ("allgather_sequential", FLAG, False, "One collective for each parameter."),
        )
    ),
    *(
        honoured(
            f"zero_optimization.stage3_{name}",
            ELEMENTS,
            f"With `offload_param`, or over ranks: {meaning} {_UNLESS}",
            default=default,
            auto=Auto.DEFAULT,
            aliases=(name,),
        )
        for name, default, meaning in (
            (
                "max_live_parameters",
                1_000_000_000,
                "elements whose weights are on the device at a time, at least what is used at once "
                "and one unit to come.",
            ),
            (
                "prefetch_bucket_size",
                50_000_000,
                "elements that come ahead of their use: as soon as there are so many, no more "
                "units are brought. 0 brings none.",
            ),
            (
                "max_reuse_distance",
                1_000_000_000,
                "a unit goes after its use where more elements than these are used before it is "
                "again.",
            ),
            (
                "param_persistence_threshold",
                100_000,
                "units of at most so many elements stay on the device for good.",
            ),
            (
                "model_persistence_threshold",
                2**63 - 1,
                "as long as they have no more elements together.",
            ),
        )
    ),
    hint(
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        FLAG,
        "Whether `save_16bit_model` may collect the weights of stage 3.",
        default=False,
        reason="weights reach rank 0 piece by piece, so they are always saved",
        aliases=(
            "gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "gather_fp16_weights_on_model_save",
        ),
    ),
    section(
        "zero_optimization.leaf_module",
        "Modules whose parameters stay in one unit, as `set_z3_leaf_modules` asks; a text that "
        "fits none is warned of.",
    ),
    *(
        honoured(
            f"zero_optimization.leaf_module.{name}",
            TEXTS,
            meaning,
            default=(),
            auto=Auto.DEFAULT,
        )
        for name, meaning in (
            ("classes", "By class, plain or with its module. DeepSpeed's default has three."),
            ("names", "By name in `named_modules()`."),
            ("name_suffixes", "By the end of such a name."),
        )
    ),
    *moot(
        "zero_optimization",
        reason="forebay changes nothing in torch",
        rows={
            "memory_efficient_linear": (FLAG, True, "Replace torch's linear function."),
            "override_module_apply": (FLAG, True, "Replace `Module.apply` in `zero.Init`."),
        },
    ),
    hint(
        "zero_optimization.log_trace_cache_warnings",
        FLAG,
        "Log when modules run in another order.",
        default=False,
        reason=_BY_UNIT,
    ),
    hint(
        "zero_optimization.enable_sanity_checks",
        FLAG,
        "Check more.",
        default=False,
        reason="the ledger and the windows are checked at every step",
    ),
    refused(
        "zero_optimization.load_from_fp32_weights",
        FLAG,
        "Whether a loaded checkpoint's master weights are used, or made from 16-bit weights.",
        default=True,
        reason="a checkpoint holds the masters, and 16-bit weights are those, rounded",
    ),
    hint(
        "zero_optimization.elastic_checkpoint",
        FLAG,
        "Checkpoints that load at another number of ranks.",
        default=False,
        reason="no checkpoint depends on a layout",
    ),
    refused(
        "zero_optimization.pipeline_loading_checkpoint",
        FLAG,
        "Read a checkpoint while the previous part is sent to the other ranks.",
        default=False,
    ),
    refused(
        "zero_optimization.save_muon_momentum_buffer_in_memory",
        FLAG,
        "Muon with offload.",
        default=False,
    ),
)

KEYS: Final[tuple[Key, ...]] = (*_STAGE, *_COMMUNICATION, *_STAGE3)
