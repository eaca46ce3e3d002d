"""The optimizer that `forebay.offload` returns: a `torch.optim.Optimizer` over an engine.

It shares the `param_groups` of the optimizer it was made from, so schedulers built before or
after work on the same dictionaries. State tensors are views of where the state lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch

from forebay.engine.state import StateEntry, check_entry, load_entry
from forebay.errors import CheckpointError, ConfigError, GradientError, UnsupportedError

if TYPE_CHECKING:
    from collections import defaultdict
    from collections.abc import Callable, Iterable

    from forebay.engine.engine import Engine

__all__ = ["OffloadedOptimizer"]


class OffloadedOptimizer(torch.optim.Optimizer):
    """Steps through an engine.

    Args:
        engine: The engine that holds the state.
        source: The user's optimizer, whose groups are shared and whose state is taken over. Its
            own `step()` raises from now on.
    """

    def __init__(self, engine: Engine, source: torch.optim.Optimizer) -> None:
        super().__init__([{**group} for group in source.param_groups], dict(source.defaults))
        self.param_groups = source.param_groups
        self._source = source
        self._source_guard = source.register_step_pre_hook(_refuse_source)
        self._loss_is_scaled = False
        # Each entry's "step" is a view, so that one operation sets all of them after a step.
        self._steps = torch.zeros(len(engine.collector.records))
        for record, step in zip(engine.collector.records, self._steps, strict=True):
            entry = source.state.pop(record.param, None)
            if entry:
                check_entry(record, entry)
                load_entry(record, entry)
            step.fill_(float(record.step))
            self._entries[record.param] = StateEntry(record, step=step)
        self.engine = engine

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """State by parameter, after the barrier: views of where it lives, never torn."""
        engine = self.__dict__.get("engine")
        if engine is not None:
            engine.quiesce("optimizer.state")
        return self._entries

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self._entries = value

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
        self._refuse_unscaled()
        try:
            self.engine.step(divisor=divisor)
        finally:
            self.show_steps()
        self._loss_is_scaled = False
        # torch's schedulers warn unless the optimizer that they were built on has stepped.
        for stepped in (self, self._source):
            stepped._opt_called = True  # type: ignore[attr-defined]

    def show_steps(self) -> None:
        """Let `state` show each parameter's own count of updates."""
        steps = [float(record.step) for record in self.engine.collector.records]
        self._steps.copy_(torch.tensor(steps))

    def _refuse_unscaled(self) -> None:
        scale = self.engine.options.loss_scale.value
        if scale != 1.0 and self.engine.collector.window.backwards and not self._loss_is_scaled:
            raise GradientError(
                f"the loss scale is {scale:g}, but no loss of this window was scaled",
                hint="call optimizer.scale(loss).backward() instead of loss.backward()",
            )

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002
        """Discard gradients; with `set_to_none=False` they are present with value 0."""
        if set_to_none:
            self.engine.zero_grad()
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad = None
            return
        super().zero_grad(set_to_none=False)
        self.engine.collector.new_window()

    def clip_grad_norm_(self, max_norm: float) -> None:
        """Clip from the next step on by the global norm, which is `last_grad_norm` after it."""
        if not max_norm > 0:
            raise ConfigError(f"max_norm is {max_norm}; it must be positive")
        self.engine.terms.clip_norm = float(max_norm)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale; call backward on what this returns (fp16 models)."""
        self._loss_is_scaled = True
        value = self.engine.options.loss_scale.value
        return loss if value == 1.0 else loss * value

    @property
    def last_grad_norm(self) -> float | None:
        """Global gradient norm of the last step before clipping; None before the first."""
        outcome = self.engine.last_outcome
        return None if outcome is None else outcome.norm

    @property
    def loss_scale(self) -> float:
        """What `scale` multiplies losses by now; 1 without loss scaling."""
        return self.engine.options.loss_scale.value

    @property
    def cur_scale(self) -> float:
        """Another name of `loss_scale`, which scripts for DeepSpeed read."""
        return self.loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped since a gradient was not finite."""
        outcome = self.engine.last_outcome
        return outcome is not None and not outcome.applied

    def synchronize(self) -> None:
        """Wait until all weights are new."""
        self.engine.synchronize()

    def refresh(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Take over weights that were written through `p.data`.

        Args:
            params: Those that were written. None means all of them; the bits that masters have
                beyond their 16-bit weights are then gone everywhere.
        """
        self.engine.refresh(params)

    def close(self) -> None:
        """Give all memory back; the model keeps its newest weights."""
        try:
            self.engine.close()
        finally:
            self._source_guard.remove()
            self._entries.clear()

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

        Tensors are references to where the state lives, not copies; state in files is read into
        memory. Beside torch's own entries
        each parameter has what completes its fp32 master: `master_low` (the low 16 bits of a
        split master) or `master`.
        """
        self.engine.settle_masters()
        state = super().state_dict()
        entries = state["state"]
        for key, entry in entries.items():
            if isinstance(entry, StateEntry):
                entries[key] = dict(entry)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Write a state dict into the state's memory, without a copy of it.

        Raises:
            CheckpointError: Its groups or shapes are not this optimizer's; nothing was changed.
        """
        self.engine.quiesce("load_state_dict")
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
            if record is not None:
                entry = state_dict["state"].get(key) or {}
                if entry:
                    check_entry(record, entry)
                pairs.append((record, entry))
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        for record, entry in pairs:
            load_entry(record, entry)
        self.show_steps()

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            "the optimizer cannot be copied or pickled: its state is in the engine's memory",
            hint="use optimizer.state_dict()",
        )


def _refuse_source(*_args: Any) -> None:
    raise UnsupportedError(
        "step() was called on the optimizer that was given to forebay",
        hint="call step() on the optimizer that forebay.offload returned",
    )
