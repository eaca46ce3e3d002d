"""`initialize` and its companions, under DeepSpeed's names and signatures."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from forebay.compat.engine import TrainingEngine
from forebay.compat.optimizers import adam_from, build_optimizer
from forebay.config.facts import Facts
from forebay.config.resolve import resolve
from forebay.engine.engine import Engine
from forebay.engine.optimizer import OffloadedOptimizer
from forebay.engine.options import EngineOptions, OverflowCheck, Timing
from forebay.errors import ConfigError, UnsupportedError
from forebay.optim.loss_scale import DynamicLossScale, LossScaleConfig, StaticLossScale
from forebay.optim.schedule import Schedule
from forebay.plan.placement import UpdatePlace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from forebay.config.resolved import PrecisionSpec, ResolvedConfig
    from forebay.optim.loss_scale import LossScale

__all__ = ["add_config_arguments", "engine_options", "init_distributed", "initialize"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def initialize(
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[TrainingEngine, OffloadedOptimizer, DataLoader[Any] | None, LRScheduler | None]:
    """Make an engine from a DeepSpeed configuration.

    Args:
        args: Parsed arguments; `args.deepspeed_config` is used where `config` is not given.
        model: The model to train. With `bf16` or `fp16` enabled a float32 model is cast.
        optimizer: `torch.optim.Adam` or `AdamW` (or a callable that makes one from parameters);
            takes the place of the configuration's `optimizer` section.
        model_parameters: Parameters or parameter groups; all trainable ones by default.
        training_data: A dataset; a loader over it is made.
        lr_scheduler: A torch scheduler, or a callable that makes one from the optimizer.
        distributed_port: Unused in one process.
        mpu: Refused.
        dist_init_required: Unused in one process.
        collate_fn: For the loader.
        config: Path, dict or base64 of the DeepSpeed JSON.
        mesh_param: Refused.
        config_params: Old name of `config`.

    Returns:
        (engine, optimizer, loader or None, scheduler or None).

    Raises:
        ConfigError: A key, value or combination is refused; nothing was changed.
        UnsupportedError: The model or optimizer cannot be honoured.
        BudgetError: The state does not fit; nothing was moved.
    """
    if model is None:
        raise ConfigError("initialize needs a model", hint="initialize(model=model, config=...)")
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise UnsupportedError(f"initialize({name}=...) is not supported yet")
    _refuse_ranks()
    raw = _one_config(args, config, config_params)
    resolved = resolve(
        raw,
        facts=Facts(
            model_dtype=_model_dtype(model),
            client_optimizer=None if optimizer is None else _class_name(optimizer),
            client_scheduler=None if lr_scheduler is None else _class_name(lr_scheduler),
            fallback_micro_batch_size=1,
            asker="forebay.initialize",
        ),
    )
    client = build_optimizer(
        model, given=optimizer, parameters=model_parameters, spec=resolved.optimizer
    )
    rule = adam_from(client)
    core = Engine(
        model,
        groups=client.param_groups,
        rule=rule,
        options=replace(
            engine_options(resolved), cast_to=_cast_to(model, precision=resolved.precision)
        ),
    )
    try:
        offloaded = OffloadedOptimizer(core, client)
        scheduler = _scheduler(lr_scheduler, resolved, offloaded)
    except BaseException:
        core.close()
        raise
    engine = TrainingEngine(core, optimizer=offloaded, config=resolved, scheduler=scheduler)
    loader = None
    if training_data is not None:
        loader = DataLoader(
            training_data,
            batch_size=resolved.batch.micro_batch_size,
            shuffle=not isinstance(training_data, torch.utils.data.IterableDataset),
            collate_fn=collate_fn,
            drop_last=resolved.dataloader_drop_last,
        )
    engine.training_dataloader = loader
    return engine, offloaded, loader, scheduler


def engine_options(
    config: ResolvedConfig, *, device: torch.device | str | None = None
) -> EngineOptions:
    """The engine's options that a resolved configuration asks for."""
    on_host = config.zero.optimizer_tier == "host"
    return EngineOptions(
        device=device,
        update=None if on_host else UpdatePlace.DEVICE,
        clip_norm=config.clip_norm,
        backwards=config.batch.accumulation_steps,
        unit_elements=config.zero.unit_elements,
        timing=Timing.SYNCHRONOUS if config.synchronous else Timing.DEFERRED,
        overflow=OverflowCheck.SKIP if config.precision.check_grad_overflow else OverflowCheck.OFF,
        loss_scale=_loss_scale(config.precision),
        device_budget=config.budgets.device_bytes,
        host_budget=config.budgets.host_bytes,
        page_lock=config.zero.pin_memory,
    )


def _cast_to(model: nn.Module, *, precision: PrecisionSpec) -> torch.dtype | None:
    """What float32 parameters become; None where the model has its working dtype already.

    A model that already has parameters of that dtype is left as it is, so that float32 norms or
    adapters in a 16-bit model keep theirs. Buffers are never cast.
    """
    dtype = _DTYPES[precision.dtype]
    if dtype is torch.float32 or any(p.dtype is dtype for p in model.parameters()):
        return None
    return dtype


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: Any = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Nothing to do in one process; several are not supported yet."""
    _refuse_ranks()


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to a parser, as scripts for DeepSpeed do."""
    group = parser.add_argument_group("forebay", "offloaded training")
    group.add_argument(
        "--deepspeed", action="store_true", help="accepted so that old command lines work"
    )
    group.add_argument(
        "--deepspeed_config", type=str, default=None, help="path of the DeepSpeed JSON"
    )
    return parser


def _refuse_ranks() -> None:
    world = int(os.environ.get("WORLD_SIZE", "1") or "1")
    if world > 1:
        raise UnsupportedError(
            f"WORLD_SIZE is {world}, but several processes are not supported yet",
            hint="start one process",
        )


def _one_config(args: argparse.Namespace | None, config: Any, config_params: Any) -> Any:
    given = [value for value in (config, config_params) if value is not None]
    if len(given) == 2:
        raise ConfigError("both config and config_params are given", hint="give config alone")
    if given:
        return given[0]
    path = getattr(args, "deepspeed_config", None)
    if path is None:
        raise ConfigError(
            "no configuration is given",
            hint="pass config=..., or args with deepspeed_config",
        )
    return path


def _model_dtype(model: nn.Module) -> str | None:
    names = {dtype: name for name, dtype in _DTYPES.items()}
    for param in model.parameters():
        if param.requires_grad and param.dtype in names:
            return names[param.dtype]
    return None


def _class_name(value: Any) -> str:
    return (
        value.__name__ if callable(value) and hasattr(value, "__name__") else type(value).__name__
    )


def _loss_scale(precision: PrecisionSpec) -> LossScale:
    spec = precision.loss_scale
    if spec is None:
        return StaticLossScale()
    if spec.static is not None:
        return StaticLossScale(spec.static)
    return DynamicLossScale(
        LossScaleConfig(
            initial_scale_power=spec.initial_scale_power,
            loss_scale_window=spec.window,
            hysteresis=spec.hysteresis,
            consecutive_hysteresis=spec.consecutive_hysteresis,
            min_loss_scale=spec.min_scale,
        )
    )


def _scheduler(
    given: Any, resolved: ResolvedConfig, optimizer: OffloadedOptimizer
) -> LRScheduler | None:
    if given is None:
        if resolved.scheduler is None:
            return None
        return Schedule(optimizer, resolved.scheduler)
    if callable(given) and not hasattr(given, "step"):
        made: LRScheduler = given(optimizer)
        return made
    scheduler: LRScheduler = given
    return scheduler
