"""`safe_get_*` and `safe_set_*`: whole fp32 values behind a parameter, under DeepSpeed's names.

Over several ranks every rank calls them for the same parameters in the same order; whatever is
exchanged says what it is, and a rank that asks for something else is an error on all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.engine.collector import GradientHook, hook_of
from forebay.engine.masters import master_as_of_now
from forebay.engine.record import GradientState
from forebay.engine.restore import write_master
from forebay.engine.whole_state import bring_whole, whole_gradient, whole_of
from forebay.errors import ConfigError, UnsupportedError
from forebay.optim.reference import round_to

if TYPE_CHECKING:
    from forebay.engine.record import ParamRecord

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]

_STATES = ("exp_avg", "exp_avg_sq")


def _hook(param: torch.Tensor) -> GradientHook:
    hook = hook_of(param)
    if hook is None:
        raise UnsupportedError(
            f"a parameter of shape {tuple(param.shape)} is not trained by an open engine",
            hint="pass a parameter of the model given to initialize() or offload()",
        )
    return hook


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """A copy of the parameter's fp32 master, in its shape, where the master lives."""
    hook = _hook(param)
    hook.engine.quiesce("safe_get_full_fp32_param")
    held = master_as_of_now(hook.record)
    return whole_of(hook.engine, hook.record, held, what="the fp32 value")


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor:
    """A copy of one optimizer state ("exp_avg" or "exp_avg_sq"), in the parameter's shape."""
    record = _record(param, optim_state_key)
    held = record.part.state(optim_state_key, record.slot)
    return whole_of(_hook(param).engine, record, held, what=optim_state_key)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The window's gradient so far in fp32, without the loss scale; None when there is none.

    Over several ranks it is the mean of theirs from the moment on when they have been summed,
    and this rank's own before.
    """
    hook = _hook(param)
    record = hook.record
    summed = whole_gradient(hook.engine, record)
    if summed is not None:
        return summed / hook.engine.options.loss_scale.value
    if param.grad is None or record.state is GradientState.CONSUMED:
        return None
    if not record.holds(param.grad):
        return param.grad.detach().float()
    if record.state is GradientState.ABSENT:
        return None
    return record.exact().float() / hook.engine.options.loss_scale.value


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set the fp32 master and, rounded, the working weight."""
    hook = _hook(param)
    record = hook.record
    _check_shape(record.slot.shape, value)
    hook.engine.quiesce("safe_set_full_fp32_param")
    part, slot = record.part, record.slot
    single = value.detach().to(torch.float32)
    if not part.high_is_weight or part.low is not None:
        part.set_master(slot, single)
    with torch.no_grad():
        rounded = round_to(single, part.dtype)
        part.store(slot, rounded)
    hook.engine.streaming.stored_changed()
    torch.autograd.graph.increment_version(record.param)
    record.master_is_loaded, record.loaded = False, None  # it would be settled over this one
    record.rebase()


def safe_set_full_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set one optimizer state from a tensor of the parameter's shape."""
    record = _record(param, optim_state_key)
    part, slot = record.part, record.slot
    _check_shape(slot.shape, value)
    part.set_state(optim_state_key, slot, part.share(value, slot))


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the window's gradient."""
    record = _hook(param).record
    record.refuse_given("replaced")
    _check_shape(record.slot.shape, value)
    param.grad = value.detach().to(device=param.device, dtype=param.dtype)


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's slice of the fp32 master, flat; no other rank takes part."""
    hook = _hook(param)
    hook.engine.quiesce("safe_get_local_fp32_param")
    return master_as_of_now(hook.record).reshape(-1)


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor:
    """A copy of this rank's slice of one optimizer state, flat; no other rank takes part."""
    record = _record(param, optim_state_key)
    return record.part.state(optim_state_key, record.slot).detach().clone().reshape(-1)


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's slice of the gradient, flat; None when there is none.

    Of the mean over ranks once it has been summed, which every rank asks for together.
    """
    grad = safe_get_full_grad(param)
    record = _hook(param).record
    return None if grad is None else record.part.share(grad, record.slot).flatten()


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set this rank's slice of the fp32 master and, rounded, of the working weight.

    In stages 1 and 2 every rank calls it, since each holds the whole weight; in stage 0 with the
    same value.
    """
    hook = _hook(param)
    record = hook.record
    part, held = record.part, record.segment
    _check_local(held.elements, value)
    hook.engine.quiesce("safe_set_local_fp32_param")
    if part.own_weights.numel() != part.weights.numel():
        hook.engine.ranks.refuse_other(f"a new value of {record.label}")
    part.await_readers()
    part.sync_high()
    if held.elements:
        write_master(record, held.start, value.detach().reshape(-1).to("cpu", torch.float32))
    bring_whole(hook.engine, part)
    hook.engine.streaming.stored_changed()
    torch.autograd.graph.increment_version(record.param)
    record.master_is_loaded, record.loaded = False, None  # it would be settled over this one
    record.rebase()


def safe_set_local_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set this rank's slice of one optimizer state; no other rank takes part."""
    record = _record(param, optim_state_key)
    _check_local(record.segment.elements, value)
    record.part.set_state(optim_state_key, record.slot, value)


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the window's gradient; only where this rank's slice is all of it (stage 0)."""
    record = _hook(param).record
    if record.segment.elements != record.slot.elements:
        raise UnsupportedError(
            "safe_set_local_grad is not supported where gradients are sharded: before their sum "
            "over ranks a rank has a whole one of its own",
            hint="safe_set_full_grad(param, value) before the backward ends",
        )
    _check_local(param.numel(), value)
    safe_set_full_grad(param, value.reshape(param.shape))


def _check_local(elements: int, value: torch.Tensor) -> None:
    if value.numel() != elements:
        raise ConfigError(f"the value has {value.numel()} elements, this rank's slice {elements}")


def _record(param: torch.Tensor, key: str) -> ParamRecord:
    if key not in _STATES:
        raise ConfigError(f"optimizer state {key!r} does not exist; there are {_STATES}")
    hook = _hook(param)
    hook.engine.quiesce("optimizer state")
    return hook.record


def _check_shape(shape: tuple[int, ...], value: torch.Tensor) -> None:
    if tuple(value.shape) != shape:
        raise ConfigError(f"the value has shape {tuple(value.shape)}, the parameter {shape}")
