"""`initialize` and its companions, under DeepSpeed's names and signatures."""

from __future__ import annotations

import argparse
import contextlib
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from forebay.compat.checkpoints import least_bytes
from forebay.compat.copies import check_mesh, copies_of, exchange_of
from forebay.compat.distributed import init_distributed, join_ranks, local_device
from forebay.compat.engine import TrainingEngine
from forebay.compat.files import nvme_options
from forebay.compat.inputs import (
    DTYPES,
    check_arguments,
    check_dtypes,
    class_name,
    model_dtype,
    one_config,
)
from forebay.compat.leaf import configured_leaves
from forebay.compat.loader import samples_in
from forebay.compat.loads import load_rules
from forebay.compat.optimizers import adam_from, build_optimizer
from forebay.compat.placed import with_placement
from forebay.compat.policies import policy_of
from forebay.compat.progress import Progress, events_folder, open_events
from forebay.compat.same_start import Start, refuse_other_start
from forebay.compat.schedulers import build_scheduler, check_scheduler
from forebay.compat.watching import enough_threads, measured_profile, watcher
from forebay.config.facts import Facts
from forebay.config.resolve import resolve
from forebay.engine.engine import Engine
from forebay.engine.optimizer import OffloadedOptimizer
from forebay.engine.options import ActivationPlace, EngineOptions, OverflowCheck, Timing
from forebay.model.inspect import refuse_wrapped
from forebay.optim.loss_scale import DynamicLossScale, LossScaleConfig, StaticLossScale
from forebay.plan.placement import AccumulationOrder, UpdatePlace, WeightPlace
from forebay.plan.share import places_for_share, places_for_units

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

    from forebay.comm.torch_group import TorchGroup
    from forebay.config.resolved import PrecisionSpec, ResolvedConfig, ZeroSpec
    from forebay.model.spec import ModelSpec
    from forebay.optim.loss_scale import LossScale

__all__ = ["CONFIG_LOG", "add_config_arguments", "engine_options", "initialize"]

CONFIG_LOG: Final = "forebay.config"
"""The log that has the configuration that runs."""

_log = logging.getLogger(CONFIG_LOG)


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
        optimizer: `torch.optim.Adam` or `AdamW`, or a class or function that makes one from
            parameters; takes the place of the configuration's `optimizer` section.
        model_parameters: Parameters or parameter groups; all trainable ones by default. Where
            `optimizer` is an optimizer, its own groups decide, as in DeepSpeed.
        training_data: A dataset; a loader of micro-batches over it is made.
        lr_scheduler: A torch scheduler over the given optimizer, or a function that makes one
            from the torch optimizer; takes the place of the configuration's `scheduler` section.
        distributed_port: Unused: torchrun's MASTER_PORT is.
        mpu: Refused.
        dist_init_required: True makes a `torch.distributed` group also for one process; for
            several, started by torchrun, there always is one.
        collate_fn: For the loader, and for those of `deepspeed_io`.
        config: Path, dict or base64 of the DeepSpeed JSON.
        mesh_param: A `DeviceMesh` of all ranks. Its last axis shards; along the first of two,
            copies of the state are kept alike.
        config_params: Old name of `config`.

    Returns:
        (engine, optimizer, loader or None, scheduler or None).

    Raises:
        ConfigError: A key, value or combination is refused, or ranks begin with different ones;
            nothing was changed.
        UnsupportedError: The model or optimizer cannot be honoured.
        BudgetError: The state does not fit; nothing was moved.
        RankError: Another rank failed.
    """
    model = check_arguments(
        args=args,
        model=model,
        optimizer=optimizer,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        collate_fn=collate_fn,
    )
    if dist_init_required:
        init_distributed()
    raw = one_config(args, config, config_params)
    group = join_ranks()
    with _told(group):
        resolved = resolve(
            raw,
            facts=Facts(
                world_size=1 if group is None else group.size,
                model_dtype=model_dtype(model),
                client_optimizer=class_name(optimizer),
                client_scheduler=class_name(lr_scheduler),
                # a loop of one's own makes its batches; the loader made here must be told
                fallback_micro_batch_size=1 if training_data is None else None,
                samples=samples_in(training_data),
                asker="forebay.initialize",
            ),
        )
        check_mesh(mesh_param, sharers=resolved.exchange.sharers)
        client = build_optimizer(
            model, given=optimizer, parameters=model_parameters, spec=resolved.optimizer
        )
        if group is not None:
            groups = client.param_groups
            _agree(group, config=resolved, model=model, groups=groups, mesh=mesh_param)
        engine = _build(
            model,
            client=client,
            config=resolved,
            scheduler=lr_scheduler,
            collate_fn=collate_fn,
            group=group,
        )
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _agree(
    group: TorchGroup,
    *,
    config: ResolvedConfig,
    model: nn.Module,
    groups: list[dict[str, Any]],
    mesh: Any,
) -> None:
    """Ranks begin with the same, and know who shares a copy of the state and how long to wait."""
    refuse_wrapped(model)
    copies = copies_of(mesh=mesh, sharers=config.exchange.sharers, size=group.size)
    start = Start(config=config, copies=copies, model=model, groups=groups)
    refuse_other_start(group, start)
    group.divide(copies)
    group.limit(config.rank_timeout)


@contextlib.contextmanager
def _told(group: TorchGroup | None) -> Iterator[None]:
    """The other ranks hear of a failure, instead of waiting for this one."""
    try:
        yield
    except BaseException as error:
        if group is not None:
            group.fail(f"{type(error).__name__}: {error}")
            group.close()
        raise


def _build(
    model: nn.Module,
    *,
    client: torch.optim.Optimizer,
    config: ResolvedConfig,
    scheduler: Any,
    collate_fn: Callable[..., Any] | None,
    group: TorchGroup | None,
) -> TrainingEngine:
    """The engine; what fails on the way leaves model and optimizer as they were."""
    check_dtypes(client.param_groups, precision=config.precision)
    rule = adam_from(client)
    check_scheduler(scheduler, client)
    is_first = group is None or group.rank == 0
    folder = None
    if config.tensorboard is not None and is_first:
        folder = events_folder(config.tensorboard)
    with contextlib.ExitStack() as undo:
        # A schedule sets the groups' rates when it is built; they are the caller's own dicts.
        undo.callback(_restore, client.param_groups, [{**g} for g in client.param_groups])
        schedule = build_scheduler(scheduler, config.scheduler, client)
        core = Engine(
            model,
            groups=client.param_groups,
            rule=rule,
            options=replace(
                engine_options(config, device=local_device(group)),
                cast_to=_cast_to(model, precision=config.precision),
                whole_modules=configured_leaves(model, config.zero.leaf),
                group=group,
                stage=config.zero.stage,
                exchange=exchange_of(config),
            ),
        )
        undo.callback(core.close)
        offloaded = OffloadedOptimizer(core, client)
        undo.callback(offloaded.close)
        engine = TrainingEngine(
            core,
            optimizer=offloaded,
            config=with_placement(config, core),
            scheduler=schedule,
            progress=Progress(
                every=config.steps_per_print,
                events=None if folder is None else open_events(folder),
                has_loss_scale=config.precision.loss_scale is not None,
                mean=core.ranks.mean,
                speaks=is_first,
            ),
            collate_fn=collate_fn,
        )
        undo.pop_all()
    if is_first:
        _log.info("the configuration that runs:\n%s", engine.config.table())
    return engine


def _restore(groups: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    for group, options in zip(groups, before, strict=True):
        group.clear()
        group.update(options)


def engine_options(
    config: ResolvedConfig, *, device: torch.device | str | None = None
) -> EngineOptions:
    """The engine's options that a resolved configuration asks for."""
    on_host = config.zero.optimizer_tier != "device"
    profile = measured_profile(config, device=device)
    cores, live = config.zero.update_cores, config.zero.loads.live_elements
    return EngineOptions(
        device=device,
        nvme=nvme_options(config),
        update=None if on_host else UpdatePlace.DEVICE,
        places=_places(config.zero) if on_host else None,
        weights=WeightPlace(config.zero.parameter_tier),
        pool_bytes=None if live is None else live * DTYPES[config.precision.dtype].itemsize,
        loads=load_rules(config),
        activations=ActivationPlace.HOST
        if config.keeps_activations_on_host
        else ActivationPlace.DEVICE,
        core_share=cores,
        threads=None if profile is None or cores is not None else enough_threads(profile),
        clip_norm=config.clip_norm,
        backwards=config.batch.accumulation_steps,
        order=AccumulationOrder(config.batch.order),
        unit_elements=config.zero.unit_elements,
        timing=Timing.SYNCHRONOUS if config.synchronous else Timing.DEFERRED,
        overflow=OverflowCheck.SKIP if config.precision.check_grad_overflow else OverflowCheck.OFF,
        loss_scale=_loss_scale(config.precision),
        device_budget=config.budgets.device_bytes,
        host_budget=config.budgets.host_bytes,
        save_bytes=least_bytes(config),
        page_lock=config.zero.pin_memory,
        rates=None if profile is None else profile.rates(),
        policy=policy_of(config),
        observe=watcher(config),
    )


def _places(zero: ZeroSpec) -> Callable[[ModelSpec], Sequence[UpdatePlace]] | None:
    if zero.streamed_units is not None:
        return partial(places_for_units, streamed=zero.streamed_units)
    return None if zero.ratio is None else partial(places_for_share, share=zero.ratio)


def _cast_to(model: nn.Module, *, precision: PrecisionSpec) -> torch.dtype | None:
    """What float32 parameters become; None where the model has its working dtype already.

    A model that already has parameters of that dtype is left as it is, so that float32 norms or
    adapters in a 16-bit model keep theirs. Buffers are never cast.
    """
    dtype = DTYPES[precision.dtype]
    if dtype is torch.float32 or any(p.dtype is dtype for p in model.parameters()):
        return None
    return dtype


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
