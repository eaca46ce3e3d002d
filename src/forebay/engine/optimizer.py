"""The optimizer that `forebay.offload` returns: a `torch.optim.Optimizer` over an engine.

It shares the `param_groups` of the optimizer it was made from, so schedulers built before or
after work on the same dictionaries. State tensors are views of where the state lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch

from forebay.errors import CheckpointError, ConfigError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.engine.engine import Engine
    from forebay.engine.record import ParamRecord

__all__ = ["OffloadedOptimizer"]


class OffloadedOptimizer(torch.optim.Optimizer):
    """Steps through an engine.

    Args:
        engine: The engine that holds the state.
        source: The user's optimizer, whose groups are shared.
    """

    def __init__(self, engine: Engine, source: torch.optim.Optimizer) -> None:
        super().__init__([{**group} for group in source.param_groups], dict(source.defaults))
        self.param_groups = source.param_groups
        self.engine = engine
        self._source = source
        for record in engine.collector.records:
            self.state[record.param] = _state_of(record)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update with the gradients since the last step (see `Engine.step`).

        Raises:
            UnsupportedError: A closure was given.
        """
        if closure is not None:
            raise UnsupportedError(
                "step(closure) is not supported: an update runs once per window",
                hint="call loss.backward() before optimizer.step()",
            )
        self.step_with(divisor=1.0)
        return None

    def step_with(self, *, divisor: float) -> None:
        """`step()` for gradients that are too large by `divisor`, as a partial window's are."""
        self.engine.step(divisor=divisor)
        # torch's schedulers warn unless the optimizer that they were built on has stepped.
        for stepped in (self, self._source):
            stepped._opt_called = True  # type: ignore[attr-defined]
        for record in self.engine.collector.records:
            self.state[record.param]["step"].fill_(float(record.step))

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002
        """Discard gradients; with `set_to_none=False` they are present with value 0."""
        if set_to_none:
            self.engine.zero_grad()
            super().zero_grad(set_to_none=True)
            return
        super().zero_grad(set_to_none=False)
        self.engine.collector.window.reset()

    def clip_grad_norm_(self, max_norm: float) -> None:
        """Clip from the next step on by the global norm, which is `last_grad_norm` after it."""
        if not max_norm > 0:
            raise ConfigError(f"max_norm is {max_norm}; it must be positive")
        self.engine.clip_norm = float(max_norm)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale; call backward on what this returns (fp16 models)."""
        value = self.engine.options.loss_scale.value
        return loss if value == 1.0 else loss * value

    @property
    def last_grad_norm(self) -> float | None:
        """Global gradient norm of the last step before clipping; None before the first."""
        outcome = self.engine.last_outcome
        return None if outcome is None else outcome.norm

    def synchronize(self) -> None:
        """Wait until all weights are new."""
        self.engine.synchronize()

    def refresh(self) -> None:
        """Take over weights that were written through `p.data`."""
        self.engine.refresh()

    def close(self) -> None:
        """Give all memory back; the model keeps its newest weights."""
        self.engine.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction."""
        if hasattr(self, "engine"):
            raise UnsupportedError(
                "parameters cannot be added after forebay took over",
                hint="add the group to the optimizer before forebay.offload",
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """State and groups in torch's format, after the barrier.

        Tensors are references to where the state lives, not copies. Beside torch's own entries
        each parameter has what completes its fp32 master: `master_low` (the low 16 bits of a
        split master) or `master`.
        """
        self.engine.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Write a state dict into the state's memory, without a copy of it.

        Raises:
            CheckpointError: Its groups or shapes are not this optimizer's; nothing was changed.
        """
        self.engine.synchronize()
        params = [param for group in self.param_groups for param in group["params"]]
        saved_groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in saved_groups]
        if sizes != [len(group["params"]) for group in self.param_groups]:
            raise CheckpointError(
                f"the state has groups of {sizes} parameters, this optimizer of "
                f"{[len(group['params']) for group in self.param_groups]}"
            )
        keys = [key for group in saved_groups for key in group["params"]]
        pairs = []
        for key, param in zip(keys, params, strict=True):
            record = self.engine.record_of(param)
            entry = state_dict["state"].get(key)
            if record is not None and entry:
                _check_entry(record, entry)
                pairs.append((record, entry))
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        for record, entry in pairs:
            _load_entry(record, entry)
            self.state[record.param]["step"].fill_(float(record.step))


def _state_of(record: ParamRecord) -> dict[str, Any]:
    part, slot = record.part, record.slot
    state: dict[str, Any] = {
        "step": torch.tensor(0.0),
        "exp_avg": part.view(part.exp_avg, slot),
        "exp_avg_sq": part.view(part.exp_avg_sq, slot),
    }
    if part.low is not None:
        state["master_low"] = part.view(part.low, slot)
    elif part.dtype is not torch.float32:
        state["master"] = part.view(part.high, slot)
    return state


def _check_entry(record: ParamRecord, entry: dict[str, Any]) -> None:
    for name in ("exp_avg", "exp_avg_sq", "step"):
        if name not in entry:
            raise CheckpointError(f"the state of {record.label} has no {name}")
    for name in ("exp_avg", "exp_avg_sq", "master", "master_low"):
        value = entry.get(name)
        if value is not None and tuple(value.shape) != record.slot.shape:
            raise CheckpointError(
                f"{name} of {record.label} has shape {tuple(value.shape)}, the parameter "
                f"{record.slot.shape}"
            )


def _load_entry(record: ParamRecord, entry: dict[str, Any]) -> None:
    part, slot = record.part, record.slot
    part.view(part.exp_avg, slot).copy_(entry["exp_avg"])
    part.view(part.exp_avg_sq, slot).copy_(entry["exp_avg_sq"])
    record.step = int(entry["step"])
    if part.low is not None and "master_low" in entry:
        part.view(part.low, slot).copy_(entry["master_low"])
        record.master_is_loaded = True
    elif part.low is not None and "master" in entry:
        part.set_master(slot, entry["master"])
        record.master_is_loaded = True
    elif part.dtype is not torch.float32 and "master" in entry:
        part.view(part.high, slot).copy_(entry["master"])
        record.master_is_loaded = True
