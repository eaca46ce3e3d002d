"""Rows of activations, checkpoints, compilation, and of what forebay does not do."""

from __future__ import annotations

from typing import Final

from forebay.config.keys import Key, honoured, moot, opaque, refused, section
from forebay.config.kinds import (
    COUNT,
    FLAG,
    POSITIVE,
    TEXT,
    TEXTS,
    choice,
    optional,
)

__all__ = ["KEYS"]

_USE_TORCH: Final = (
    "write false; activations are recomputed by torch.utils.checkpoint, or "
    "gradient_checkpointing_enable of the model"
)
_OUT_OF_SCOPE: Final = "forebay trains with offload and leaves this to others"

_ACTIVATIONS: Final[tuple[Key, ...]] = (
    section("activation_checkpointing", "Activations that are recomputed in backward."),
    honoured(
        "activation_checkpointing.cpu_checkpointing",
        FLAG,
        "Keep on the host what `torch.utils.checkpoint` keeps of a forward (the inputs of "
        "checkpointed regions, as `gradient_checkpointing_enable` makes them), copied beside "
        "computation.",
        default=False,
    ),
    *(
        refused(
            f"activation_checkpointing.{name}", FLAG, meaning, default=False, instead=_USE_TORCH
        )
        for name, meaning in (
            ("partition_activations", "Share the kept activations over ranks."),
            ("contiguous_memory_optimization", "Keep them in one buffer."),
            ("synchronize_checkpoint_boundary", "Wait for the device at each boundary."),
            ("profile", "Time forward and backward of each part."),
        )
    ),
    *moot(
        "activation_checkpointing",
        reason="it acts with contiguous_memory_optimization only",
        rows={
            "number_checkpoints": (optional(POSITIVE), None, "Number of parts."),
        },
    ),
)

_CHECKPOINTS: Final[tuple[Key, ...]] = (
    section("checkpoint", "How checkpoints are written and read."),
    *moot(
        "checkpoint",
        reason="ranks that save under different tags are always refused",
        rows={
            "tag_validation": (
                choice(
                    "Ignore", "IGNORE", "ignore", "Warn", "WARN", "warn", "Fail", "FAIL", "fail"
                ),
                "Warn",
                "What to do when ranks save under different tags.",
            ),
        },
    ),
    refused("checkpoint.load_universal", FLAG, "Load a universal checkpoint.", default=False),
    refused(
        "checkpoint.use_node_local_storage",
        FLAG,
        "Write to a drive of each node.",
        default=False,
    ),
    section("checkpoint.parallel_write", "Who writes which part."),
    refused(
        "checkpoint.parallel_write.pipeline_stage",
        FLAG,
        "Pipeline stages write beside each other.",
        default=False,
    ),
    refused(
        "checkpoint.checkpoint_serialization",
        FLAG,
        "Pickle the tensors with the rest.",
        default=True,
    ),
    section("checkpoint.writer", "The writer of files."),
    honoured(
        "checkpoint.writer.decoupled",
        FLAG,
        "Write while training goes on, from a consistent copy.",
        default=False,
    ),
    honoured(
        "checkpoint.writer.show_statistics",
        FLAG,
        "Log each checkpoint's size, time and bandwidth.",
        default=False,
    ),
    *moot(
        "checkpoint.writer",
        reason="each rank has one writer: four threads, blocks of 16 MiB from its state",
        rows={
            "type": (choice("FAST", "PYTHON"), "FAST", "Implementation."),
            "io_buffer_size": (POSITIVE, 64 << 20, "Bytes per write."),
            "io_buffer_double": (FLAG, True, "Two buffers in turn."),
            "data_parallel": (optional(TEXT), None, "Ranks that share the writing."),
            "io_multiplier": (POSITIVE, 1, "Writers per rank."),
        },
    ),
    opaque("nebula", "Azure's checkpoint service.", reason=_OUT_OF_SCOPE),
    opaque("datastates_ckpt", "DataStates' checkpoint engine.", reason=_OUT_OF_SCOPE),
)

_COMPILE: Final[tuple[Key, ...]] = (
    section("compile", "DeepCompile."),
    *(
        refused(
            f"compile.{name}",
            FLAG,
            meaning,
            default=False,
            instead="leave it out; blocks compiled with torch.compile work as they are",
        )
        for name, meaning in (
            ("deepcompile", "Compile the model together with ZeRO."),
            ("free_activation", "Free activations early."),
            ("offload_activation", "Move activations to the host."),
            ("offload_opt_states", "Move Adam's state to the host by a graph pass."),
            ("offload_parameters", "Move weights to the host by a graph pass."),
        )
    ),
    *moot(
        "compile",
        reason="it acts with compile.deepcompile only",
        rows={
            "free_activation_threshold": (COUNT, 10 << 20, "Bytes of an activation to free."),
            "offload_activation_pin_memory": (FLAG, True, "Page-lock the host's copy."),
            "double_buffer": (FLAG, True, "Two buffers for gradients."),
            "symmetric_memory": (FLAG, False, "torch's symmetric memory."),
            "sync_before_reduce": (FLAG, False, "Wait before a reduction."),
            "sync_after_reduce": (FLAG, False, "Wait after it."),
            "sync_before_allgather": (FLAG, False, "Wait before a gather."),
            "sync_after_allgather": (FLAG, False, "Wait after it."),
            "keep_int_input_tensors": (FLAG, True, "Keep integer inputs for profiling."),
            "keep_all_input_tensors": (FLAG, False, "Keep all inputs."),
            "debug_log": (FLAG, False, "Log the passes."),
            "passes": (optional(TEXTS), None, "Which passes run."),
        },
    ),
)

_ELSEWHERE: Final[tuple[Key, ...]] = (
    *(
        opaque(name, meaning, reason=_OUT_OF_SCOPE)
        for name, meaning in (
            ("autotuning", "Search for a configuration."),
            ("elasticity", "Batch sizes for a changing number of ranks."),
            ("eigenvalue", "Eigenvalues for quantization."),
            ("progressive_layer_drop", "Drop layers at random."),
            ("compression_training", "Quantization and pruning."),
            ("quantize_training", "Quantization (old name)."),
            ("data_efficiency", "Data sampling and token dropping."),
            ("curriculum_learning", "Data of growing difficulty (old name)."),
            ("hybrid_engine", "One engine for training and generation."),
            ("sparse_attention", "Block-sparse attention."),
            ("pipeline", "Pipeline parallelism."),
            ("tensor_parallel", "Tensor parallelism."),
            ("expert_parallel", "Expert parallelism."),
        )
    ),
    refused(
        "graph_harvesting",
        FLAG,
        "Run the update from a CUDA graph.",
        default=False,
        reason=_OUT_OF_SCOPE,
    ),
    refused("sequence_parallel_size", POSITIVE, "Ranks that share a sequence.", default=1),
)

KEYS: Final[tuple[Key, ...]] = (*_ACTIVATIONS, *_CHECKPOINTS, *_COMPILE, *_ELSEWHERE)
