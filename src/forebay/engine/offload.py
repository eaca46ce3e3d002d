"""`forebay.offload`: two lines in any training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from forebay.engine.engine import Engine
from forebay.engine.offload_files import nvme_options
from forebay.engine.offload_policy import asked_policy
from forebay.engine.optimizer import OffloadedOptimizer
from forebay.engine.options import ActivationPlace, EngineOptions, Timing
from forebay.engine.save_request import LEAST_SAVE_BYTES
from forebay.errors import ConfigError, UnsupportedError
from forebay.optim.loss_scale import DynamicLossScale, LossScaleConfig, StaticLossScale
from forebay.optim.rule import AdamRule
from forebay.plan.placement import WeightPlace
from forebay.units_of_measure import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.engine.offload_files import Folders
    from forebay.engine.offload_policy import Update
    from forebay.optim.loss_scale import LossScale

__all__ = ["offload", "offload_with"]


def offload(  # noqa: PLR0913 - the public face, fixed by the design
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    device: torch.device | str | None = None,
    device_budget: str | int | None = None,
    host_budget: str | int | None = None,
    clip_norm: float | None = None,
    parameters: str = "device",
    activations: str = "device",
    synchronous: bool = False,
    nvme_path: Folders | None = None,
    aio: Mapping[str, Any] | None = None,
    update: Update = "exact",
) -> tuple[nn.Module, OffloadedOptimizer]:
    """Keep a model's optimizer state in host memory and train it with the same arithmetic.

    The model's parameters move to `device`, its masters and moments to the host. Then go on as
    before: `loss.backward(); optimizer.step(); optimizer.zero_grad()`.

    Args:
        model: Any module, on any device. fp32 models stay fp32; 16-bit models get fp32 masters.
        optimizer: `torch.optim.AdamW` or `Adam` over its parameters; its groups are shared.
        device: Where it trains; None for the current accelerator.
        device_budget: Bytes ("20GiB") that may be placed on the device; None for no bound.
        host_budget: Bytes that may be placed on the host; None for what the machine has.
        clip_norm: Bound on the global gradient norm; None does not clip.
        parameters: Where the working weights live: "device", or "host" for models larger than the
            device: each pass then brings them up unit by unit, into what `device_budget` leaves;
            "nvme" lets those of units whose state is in files be there too.
        activations: Where the inputs of checkpointed regions wait for the backward: "device", or
            "host", copied beside computation.
        synchronous: Let `step()` wait for everything instead of each unit's next forward.
        nvme_path: A folder on a local drive, or several as one striped space, for the state that
            `host_budget` has no room for (all of it without one); None keeps all in memory.
        aio: How files are read and written, as DeepSpeed's section of that name: `block_size`,
            `queue_depth`, `intra_op_parallelism`, `single_submit`, `overlap_events`.
        update: When updates run, as the configuration's key `forebay.update`: "exact",
            "speculative", "delayed" or "zenflow"; with settings, `{"delayed": {"warm_up_steps":
            10}}`, or `{"zenflow": {...}}` with the keys of that section.

    Returns:
        The model, and an optimizer to use in place of the one given.

    Raises:
        UnsupportedError: The model or optimizer cannot be honoured.
        BudgetError: The state does not fit; nothing was moved.
        StorageError: A folder for files is missing, read-only or full.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> model, optimizer = offload(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step(); optimizer.zero_grad()
        >>> optimizer.close()
    """
    _refuse_arguments(model, optimizer)
    _refuse_ranks()
    if not isinstance(synchronous, bool):
        raise ConfigError(f"synchronous is {synchronous!r}; it must be True or False")
    is_number = isinstance(clip_norm, int | float) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (is_number and clip_norm > 0):
        raise ConfigError(
            f"clip_norm is {clip_norm!r}; it must be a positive number",
            hint="clip_norm=None does not clip",
        )
    for name, place in (("parameters", parameters), ("activations", activations)):
        if place not in ("device", "host") and (name, place) != ("parameters", "nvme"):
            raise ConfigError(
                f"{name} is {place!r}; they live on the device or on the host",
                hint=f'{name}="device" or {name}="host"',
            )
    if parameters == "nvme" and nvme_path is None:
        raise ConfigError(
            'parameters is "nvme", and no folder is given for them',
            hint='nvme_path="/folder/on/a/local/drive"',
        )
    return offload_with(
        model,
        optimizer,
        options=EngineOptions(
            device=device,
            weights=WeightPlace(parameters),
            activations=ActivationPlace(activations),
            device_budget=None if device_budget is None else parse_bytes(device_budget),
            host_budget=None if host_budget is None else parse_bytes(host_budget),
            save_bytes=LEAST_SAVE_BYTES,
            clip_norm=clip_norm,
            timing=Timing.SYNCHRONOUS if synchronous else Timing.DEFERRED,
            loss_scale=_default_loss_scale(model),
            nvme=nvme_options(nvme_path, aio=aio),
            policy=asked_policy(update),
        ),
    )


def _default_loss_scale(model: nn.Module) -> LossScale:
    """A dynamic loss scale for models with fp16 parameters, none otherwise."""
    if any(p.dtype is torch.float16 and p.requires_grad for p in model.parameters()):
        return DynamicLossScale(LossScaleConfig())
    return StaticLossScale()


def offload_with(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, options: EngineOptions
) -> tuple[nn.Module, OffloadedOptimizer]:
    """`offload` with every option of the engine."""
    _refuse_arguments(model, optimizer)
    rule = AdamRule.of(optimizer)
    engine = Engine(model, groups=optimizer.param_groups, rule=rule, options=options)
    return model, OffloadedOptimizer(engine, optimizer)


def _refuse_ranks() -> None:
    if distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size > 1:
            raise UnsupportedError(
                f"forebay.offload trains in one process, and torch.distributed has {size} ranks, "
                "whose weights would part",
                hint="use forebay.initialize, which adds gradients up over the ranks",
            )


def _refuse_arguments(model: object, optimizer: object) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"the model is of type {type(model).__name__}, not a torch.nn.Module",
            hint="forebay.offload(model, optimizer)",
        )
    if isinstance(optimizer, OffloadedOptimizer):
        raise UnsupportedError(
            "the optimizer is one that forebay returned: this model is offloaded already",
            hint="call optimizer.close() first, then offload with a new torch optimizer",
        )
