"""What `initialize` accepts: each argument is checked before anything is built from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forebay.compat.loader import check_dataset
from forebay.engine.optimizer import OffloadedOptimizer
from forebay.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from forebay.config.resolved import PrecisionSpec

__all__ = [
    "DTYPES",
    "check_arguments",
    "check_dtypes",
    "chosen_parameters",
    "class_name",
    "model_dtype",
    "one_config",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def check_arguments(
    *,
    args: Any,
    model: Any,
    optimizer: Any,
    training_data: Any,
    lr_scheduler: Any,
    mpu: Any,
    collate_fn: Any,
) -> nn.Module:
    """Refuse arguments of `initialize` of a wrong type, and what is not there yet.

    Returns:
        The model.

    Raises:
        ConfigError: An argument is missing or of a wrong type.
        UnsupportedError: It asks for what is not there yet.
    """
    checked = _check_model(args, model)
    if mpu is not None:
        raise UnsupportedError(
            "initialize(mpu=...) is not supported yet",
            hint="leave it out: every rank trains the whole model",
        )
    _check_optimizer(optimizer)
    if lr_scheduler is not None and not callable(lr_scheduler) and not _steps(lr_scheduler):
        raise ConfigError(
            f"lr_scheduler is of type {type(lr_scheduler).__name__}",
            hint="pass a torch scheduler, a function from the optimizer to one, or write a "
            '"scheduler" section',
        )
    if training_data is not None:
        check_dataset(training_data, name="training_data")
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(
            f"collate_fn is of type {type(collate_fn).__name__}, which cannot be called"
        )
    return checked


def _check_model(args: Any, model: Any) -> nn.Module:
    if isinstance(args, nn.Module):
        raise ConfigError(
            "the first argument of initialize is args, and it is given a model",
            hint="initialize(model=model, config=...)",
        )
    if model is None:
        raise ConfigError("initialize needs a model", hint="initialize(model=model, config=...)")
    if isinstance(model, nn.Module):
        return model
    if isinstance(getattr(model, "module", None), nn.Module):
        raise ConfigError(
            f"the model is of type {type(model).__name__}, not an nn.Module",
            hint="pass the module inside: initialize(model=model.module, ...)",
        )
    raise ConfigError(
        f"the model is of type {type(model).__name__}, not an nn.Module",
        hint="initialize(model=model, config=...)",
    )


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, OffloadedOptimizer):
        raise UnsupportedError(
            "the optimizer is forebay's own already",
            hint="pass the torch optimizer that it was made from, after close()",
        )
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer):
        return
    hint = "pass torch.optim.AdamW(model.parameters(), lr=...), or a function that makes one"
    if isinstance(optimizer, str):
        hint = f'name it in the configuration: "optimizer": {{"type": "{optimizer}"}}'
    raise ConfigError(
        f"the optimizer is of type {type(optimizer).__name__}, not a torch.optim.Optimizer",
        hint=hint,
    )


def _steps(scheduler: Any) -> bool:
    return callable(getattr(scheduler, "step", None))


def one_config(args: Any, config: Any, config_params: Any) -> Any:
    """The one configuration that was given.

    Raises:
        ConfigError: None was given, or several.
    """
    places = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    given = [name for name, value in places.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(
            f"the configuration is given {len(given)} times: {' and '.join(given)}",
            hint=f"give {given[0]} alone",
        )
    if not given:
        raise ConfigError(
            "no configuration is given",
            hint="pass config=..., or args with deepspeed_config (add_config_arguments)",
        )
    return places[given[0]]


def chosen_parameters(model: nn.Module, given: Any) -> list[Any]:
    """What an optimizer is built over: the caller's parameters or groups, or all trainable ones.

    Raises:
        ConfigError: The caller's are none, or there is nothing to train.
    """
    if given is None:
        trainable = [param for param in model.parameters() if param.requires_grad]
        if not trainable:
            raise ConfigError(
                "no parameter of the model requires a gradient, so there is nothing to train"
            )
        return trainable
    hint = "pass model.parameters(), or a list of groups: [{'params': [...], 'lr': ...}]"
    if isinstance(given, torch.Tensor | str | dict) or not hasattr(given, "__iter__"):
        raise ConfigError(
            f"model_parameters is of type {type(given).__name__}, not a list of parameters or "
            "groups",
            hint=hint,
        )
    chosen = list(given)
    if not chosen:
        raise ConfigError(
            "model_parameters is empty",
            hint="a generator is empty once it was used; make it anew",
        )
    for entry in chosen:
        value = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
        if isinstance(value, torch.Tensor) or (isinstance(value, dict) and "params" in value):
            continue
        raise ConfigError(
            f"model_parameters holds an entry of type {type(entry).__name__}, which is neither a "
            "parameter nor a group",
            hint=hint,
        )
    return chosen


def check_dtypes(groups: Sequence[Mapping[str, Any]], *, precision: PrecisionSpec) -> None:
    """Refuse 16-bit parameters that the configured precision would train wrongly.

    Raises:
        ConfigError: The configuration says bf16 and a parameter is fp16, or the other way round;
            or a parameter is fp16 and there is no loss scale.
    """
    wrong = {
        "float32": {torch.float16},
        "bfloat16": {torch.float16},
        "float16": {torch.bfloat16},
    }[precision.dtype]
    for index, group in enumerate(groups):
        for param in group["params"]:
            if param.requires_grad and param.dtype in wrong:
                name = _NAMES[param.dtype]
                section = "fp16" if param.dtype is torch.float16 else "bf16"
                raise ConfigError(
                    f"a parameter of group {index} with shape {tuple(param.shape)} is {name}, and "
                    f"the configuration trains in {precision.dtype}",
                    hint=f'write "{section}": {{"enabled": true}}, or load the model in float32',
                )


def model_dtype(model: nn.Module) -> str | None:
    """Dtype of the first trained parameter, by name; None where none of them is known."""
    for param in model.parameters():
        if param.requires_grad and param.dtype in _NAMES:
            return _NAMES[param.dtype]
    return None


def class_name(value: Any) -> str | None:
    """How an object, class or function is called in messages; None for None."""
    if value is None:
        return None
    name = getattr(value, "__name__", None) if callable(value) else None
    return name or type(value).__name__
