"""Rows of batch, gradients and the loop around them."""

from __future__ import annotations

from typing import Final

from forebay.config.keys import Auto, Key, hint, honoured, refused
from forebay.config.kinds import (
    FLAG,
    INTERVAL,
    NON_NEGATIVE,
    POSITIVE,
    POSITIVE_NUMBER,
    TEXT,
    choice,
    optional,
)

__all__ = ["KEYS"]

_AVERAGED: Final = "gradients are averaged once, in fp32, together with clipping and loss scale"
_AUTO: Final = Auto.CALLER

_BATCH: Final[tuple[Key, ...]] = (
    honoured(
        "train_batch_size",
        POSITIVE,
        "Samples per update over all processes: micro batch x accumulation steps x processes.",
        default=None,
        auto=_AUTO,
        fact="train_batch_size",
    ),
    honoured(
        "train_micro_batch_size_per_gpu",
        POSITIVE,
        "Samples per forward pass of one process.",
        default=None,
        auto=_AUTO,
        fact="micro_batch_size",
    ),
    honoured(
        "gradient_accumulation_steps",
        POSITIVE,
        "Forward passes per update; their gradients are averaged.",
        default=None,
        auto=_AUTO,
        fact="accumulation_steps",
    ),
    refused(
        "managed_gradient_accumulation",
        FLAG,
        "Whether the engine counts the accumulation steps itself.",
        default=True,
    ),
    honoured(
        "dataloader_drop_last",
        FLAG,
        "Whether the loader made from `training_data` drops an incomplete last batch.",
        default=False,
    ),
)

_GRADIENTS: Final[tuple[Key, ...]] = (
    honoured(
        "gradient_clipping",
        NON_NEGATIVE,
        "Largest global norm of the gradients; 0 turns clipping off. Left out it is 1.0, as in "
        "DeepSpeed 0.19.",
        default=1.0,
        auto=Auto.DEFAULT,
        fact="clip_norm",
    ),
    hint(
        "prescale_gradients",
        FLAG,
        "Average before the sum over ranks instead of after it.",
        default=False,
        reason=_AVERAGED,
    ),
    refused(
        "gradient_predivide_factor",
        POSITIVE_NUMBER,
        "Part of the averaging that is done before the sum over ranks.",
        default=1.0,
        reason=_AVERAGED,
    ),
    refused(
        "gradient_allreduce_op",
        choice("mean", "sum"),
        "Whether gradients are averaged or summed over ranks.",
        default="mean",
        reason="gradients are averaged over ranks; multiply the loss by their number for a sum",
    ),
    honoured(
        "communication_data_type",
        optional(choice("fp16", "bfp16", "bf16", "fp32")),
        "Dtype in which gradients travel between ranks; they are added in fp32. null is their "
        "own, and fp32 for sums of several backwards, which loses nothing.",
        default=None,
        auto=Auto.DEFAULT,
    ),
    hint(
        "seq_parallel_communication_data_type",
        optional(choice("fp16", "bfp16", "bf16", "fp32")),
        "Dtype of the exchange in sequence parallelism.",
        default="fp32",
        reason="every rank has whole sequences",
    ),
    refused(
        "sparse_gradients",
        FLAG,
        "Exchange the gradients of embeddings as sparse tensors.",
        default=False,
    ),
    hint(
        "disable_allgather",
        FLAG,
        "Exchange parameters by broadcast instead of all-gather.",
        default=False,
        reason="weights are exchanged unit by unit, at every stage alike",
    ),
)

_LOOP: Final[tuple[Key, ...]] = (
    hint(
        "zero_allow_untested_optimizer",
        FLAG,
        "Accept optimizers that DeepSpeed has not tested.",
        default=False,
        reason="Adam and AdamW are supported, whoever builds them; others are refused by name",
    ),
    hint(
        "zero_force_ds_cpu_optimizer",
        FLAG,
        "Insist on DeepSpeedCPUAdam with offload.",
        default=True,
        reason="torch.optim.Adam and AdamW run on forebay's own kernel",
    ),
    honoured(
        "steps_per_print",
        INTERVAL,
        "Updates between two progress lines on stderr; null prints none.",
        default=None,
        auto=Auto.DEFAULT,
    ),
    hint(
        "dump_state",
        FLAG,
        "Print the configuration at the start.",
        default=False,
        reason="the resolved configuration is always logged",
    ),
    hint(
        "log_level",
        optional(TEXT),
        "Level of DeepSpeed's own logger.",
        default=None,
        reason='forebay logs under the name "forebay" of the logging module',
    ),
)

KEYS: Final[tuple[Key, ...]] = (*_BATCH, *_GRADIENTS, *_LOOP)
