"""What the caller knows and a configuration file does not: the values behind "auto"."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Facts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Values from the command line, the model and the caller's own objects.

    A fact fills a key that the configuration leaves out or sets to "auto". A fact that differs
    from a number in the configuration is an error, so leave None what nobody decided.

    Attributes:
        world_size: Processes that train together.
        model_dtype: Dtype of the model's weights, or the one asked for on the command line:
            "float32", "bfloat16" or "float16".
        train_batch_size: Samples per update over all processes.
        micro_batch_size: Samples per forward pass of one process.
        accumulation_steps: Forward passes per update.
        fallback_micro_batch_size: Used only where configuration and facts say nothing else of
            the batch; it contradicts nothing.
        learning_rate: Peak learning rate.
        betas: Adam's decay rates.
        eps: Adam's epsilon.
        weight_decay: Weight decay.
        clip_norm: Largest global gradient norm; 0 turns clipping off.
        total_steps: Updates in the whole run.
        warmup_steps: Updates of warm-up.
        samples: Samples of the training data, where they are counted.
        epochs_run_on: Whether an update may take samples of two epochs, so that no batch is
            incomplete and `dataloader_drop_last` drops none.
        client_optimizer: Class name of an optimizer that the caller built. It takes the place
            of the configuration's `optimizer` section, as in DeepSpeed.
        client_scheduler: Class name of a scheduler that the caller built; likewise.
        asker: Who resolves the configuration, for messages ("forebay train").
    """

    world_size: int = 1
    model_dtype: str | None = None
    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    fallback_micro_batch_size: int | None = None
    learning_rate: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    clip_norm: float | None = None
    total_steps: int | None = None
    warmup_steps: int | None = None
    samples: int | None = None
    epochs_run_on: bool = False
    client_optimizer: str | None = None
    client_scheduler: str | None = None
    asker: str = "the caller"
