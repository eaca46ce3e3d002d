"""The collector: takes every gradient as autograd produces it and sends units on their way.

It hears of each firing of a parameter's AccumulateGrad, keeps the addends of law 1a in order,
and tells the executor when a unit's gradient is complete. When a unit leaves early that is a
hint taken from the last backward; an addend that comes later is added where the gradient is.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from forebay.engine.away_reads import away_read_error
from forebay.engine.record import GradientState
from forebay.engine.standin import StandIn
from forebay.engine.unit import WeightState
from forebay.engine.window import Window
from forebay.errors import GradientError, PendingWeightError, UnsupportedError
from forebay.links.observer import Moment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils.hooks import RemovableHandle

    from forebay.engine.departure import Departure
    from forebay.engine.engine import Engine
    from forebay.engine.executor import Executor
    from forebay.engine.held_addends import HeldAddends
    from forebay.engine.policy import UpdatePolicy
    from forebay.engine.record import ParamRecord
    from forebay.engine.unit import Unit
    from forebay.plan.program import Program

__all__ = ["Collector", "GradientHook", "hook_of"]


class GradientHook:
    """The hook on one parameter: how autograd, and helpers given the parameter, find its record.

    It keeps neither alive: the collector of garbage does not see what a parameter's hooks hold,
    so an engine that nobody closed would stay for ever.

    Args:
        engine: The engine that trains the parameter.
        record: Its record.
    """

    def __init__(self, engine: Engine, record: ParamRecord) -> None:
        self._engine = weakref.ref(engine)
        self._record = weakref.ref(record)

    def __call__(self, param: torch.Tensor) -> None:
        """A gradient of the parameter is in `param.grad`."""
        if self.is_alive:
            self.engine.receive_gradient(self.record, param)

    @property
    def is_alive(self) -> bool:
        """Whether the engine is still there."""
        return self._engine() is not None

    @property
    def engine(self) -> Engine:
        """The engine; only while it is there."""
        engine = self._engine()
        assert engine is not None
        return engine

    @property
    def record(self) -> ParamRecord:
        """The record; only while the engine is there."""
        record = self._record()
        assert record is not None
        return record


def hook_of(param: torch.Tensor) -> GradientHook | None:
    """The hook of an open engine on a parameter, None when no engine trains it."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    ours = (hook for hook in hooks.values() if isinstance(hook, GradientHook))
    return next((hook for hook in ours if hook.is_alive), None)


class Collector:
    """Receives gradients.

    Args:
        units: Every unit by index.
        executor: Carries out what a complete gradient starts.
        departure: Decides when it starts, and agrees with other ranks on it.
        policy: Hears of every moment of the window.
        expected: Backwards per update as far as known.

    Attributes:
        window: The present window.
        program: The program in force; the engine replaces it between windows.
        held: Takes addends that come in parts; None where they do not. Where it is there, who put
            it there says when units are complete.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        executor: Executor,
        departure: Departure,
        policy: UpdatePolicy,
        program: Program,
        expected: int,
    ) -> None:
        self.units = units
        self.records = [record for unit in units for record in unit.records]
        self._executor = executor
        self.departure = departure
        self.policy = policy
        for unit in units:
            unit.follow(policy)
        self.program = program
        self.window = Window(
            expected=expected,
            on_open=self._open_backward,
            on_begin=self._begin_backward,
            on_end=self._end_backward,
            on_spoil=policy.spoiled,
        )
        # Parameters whose p.grad the user had put there when the present backward began.
        self._foreign: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self.held: HeldAddends | None = None

    def attach(self, engine: Engine) -> None:
        """Register a hook on every parameter.

        Args:
            engine: Receives the gradients and hands them to `receive`.
        """
        for record in self.records:
            hook = GradientHook(engine, record)
            self._handles.append(record.param.register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def receive(self, record: ParamRecord, param: torch.Tensor) -> None:
        """One firing of a parameter's AccumulateGrad."""
        self.window.count()
        grad = param.grad
        assert grad is not None
        if self.units[record.unit].departed:
            self.policy.disturb(self.units[record.unit])
        if record.holds(grad):
            addend = record.captured
            if addend is None:
                return
            self._refuse(record, addend)
            record.captured = None
            if not self._sums_at_once(record):
                addend = addend.clone()  # it is autograd's, which may write into it again
        else:
            # p.grad was None or the user's own tensor: what it holds now is the whole gradient
            self._refuse(record, grad)
            record.discard()
            addend = grad.clone() if record.index in self._foreign else grad
        if self.held is not None and self.held.take(record, addend.detach().contiguous()):
            param.grad = None
            return
        param.grad = record.standin
        self._accept(record, addend.detach().contiguous())

    def deliver(self, record: ParamRecord, addend: torch.Tensor) -> None:
        """An addend that was held while its parts came in."""
        record.param.grad = record.standin
        self._accept(record, addend)

    def _sums_at_once(self, record: ParamRecord) -> bool:
        """Whether an addend is added to others on the device before autograd goes on."""
        unit = self.units[record.unit]
        more = record.total is not None or bool(record.addends)
        if record.arrival is not None or unit.sums_on_host:
            return False
        return more and record.state is GradientState.OPEN

    def _refuse(self, record: ParamRecord, addend: torch.Tensor) -> None:
        unit = self.units[record.unit]
        if unit.state is WeightState.PENDING:
            raise PendingWeightError(
                f"unit {unit.name} was read while its new weights were on their way: {record.label}"
                " got a gradient, but no hook of its module ran since the last step()",
                hint="call optimizer.synchronize() before using weights outside their module's "
                "forward, or set forebay.synchronous: true",
            )
        if unit.streams_weights and not unit.was_used:
            raise away_read_error(record.label, seen="it got a gradient")
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() >= 0:
            raise GradientError(
                f"backward(create_graph=True) reached {record.label}; gradients of gradients "
                "cannot leave the device",
                hint="call backward() without create_graph",
            )
        if isinstance(addend, StandIn):
            raise GradientError(
                f"p.grad of {record.label} is what stood in for a gradient of another window",
                hint="clone() a gradient that is to be put back later",
            )
        if addend.layout is not torch.strided:
            raise UnsupportedError(
                f"{record.label} has a gradient of layout {addend.layout}",
                hint="build the embedding with sparse=False",
            )
        if tuple(addend.shape) != record.slot.shape:
            raise UnsupportedError(
                f"{record.label} has a gradient of shape {tuple(addend.shape)}, but was of shape "
                f"{record.slot.shape} when forebay took over",
                hint="resize embeddings and replace weights before forebay takes over",
            )
        home = record.part
        if addend.dtype is not home.dtype or addend.device != home.device:
            raise UnsupportedError(
                f"{record.label} has a gradient in {addend.dtype} on {addend.device}, but was "
                f"{home.dtype} on {home.device} when forebay took over",
                hint="convert or move the model before forebay takes over, and leave p.grad_dtype "
                "as it is",
            )

    def _accept(self, record: ParamRecord, addend: torch.Tensor) -> None:
        unit = self.units[record.unit]
        record.firings += 1
        alone = self.departure.ranks == 1
        late = record.state is GradientState.LANDED
        if alone and late and (unit.departed or not unit.sums_on_host):
            self._executor.local.fold_late(unit, record, addend)
        else:
            record.zeroed = False
            record.addends.append(addend)
            if record.state is not GradientState.LANDED:
                record.move(GradientState.OPEN)
                unit.departed = False
            if not (record.arrival is not None or unit.sums_on_host):
                record.device_value()
        if self.held is None and record.firings == record.expected:
            unit.remaining -= 1
            if unit.remaining == 0:
                self._executor.mark(Moment.UNIT_END, unit.name)
                if self._leaves_now(unit):
                    self._depart(unit)

    def complete(self, units: Sequence[Unit]) -> None:
        """In a backward that holds addends: these units have all that the window brings them."""
        for unit in units:
            self._executor.mark(Moment.UNIT_END, unit.name)
            if self._leaves_now(unit) and self.departure.has_more(unit):
                self._depart(unit)

    def _leaves_now(self, unit: Unit) -> bool:
        every = self.departure.leaves_every_backward or unit.sums_on_host
        return self.window.is_last or every

    def _depart(self, unit: Unit, *, last: bool | None = None) -> None:
        unit.departed = True
        is_last = self.window.is_last if last is None else last
        self.departure.complete(self.program, unit, last=is_last)
        if is_last and last is None:
            self.policy.complete(self.program, unit)

    def _open_backward(self) -> None:
        self._executor.mark(Moment.BACKWARD_BEGIN)
        self._forget_if_cleared()
        self._foreign = {
            record.index
            for record in self.records
            if (grad := record.param.grad) is not None and not record.holds(grad)
        }

    def refuse_if_spoiled(self) -> None:
        """Raise GradientError when a backward of this window raised."""
        self._forget_if_cleared()
        self.window.refuse_if_spoiled()

    def _forget_if_cleared(self) -> None:
        """Begin a new window where a spoiled one was cleared through `p.grad` alone.

        `model.zero_grad()` does that; the window does not hear of it otherwise.
        """
        self.window.bury_dead()
        if not (self.window.spoiled or self.departure.is_spread):
            return
        held = [record for record in self.records if record.state is not GradientState.ABSENT]
        if held and not any(record.holds(record.param.grad) for record in held):
            boundary = self.window.boundary
            self.new_window()
            self.window.boundary = boundary

    def _begin_backward(self) -> None:
        self.policy.begin_backward(self.program, last=self.window.is_last)
        for unit in self.units:
            unit.departed = False
            for part in unit.parts:
                part.drop_idle_spare()
            unit.remaining = sum(1 for record in unit.records if record.expected)
        for record in self.records:
            record.firings = 0
        self.departure.begin(self.window)
        if self.window.is_last:
            self._executor.last_backward_begins(self.program)

    def _end_backward(self) -> None:
        self._executor.mark(Moment.BACKWARD_END)
        for record in self.records:
            record.expected = record.firings
        for unit in self.units:
            if self._leaves_now(unit) and self.departure.has_more(unit):
                self._depart(unit)
        self.departure.end(self.program, last=self.window.is_last)

    def seal(self) -> None:
        """End the window: read the truth from every `p.grad` and send the rest on its way.

        Raises:
            GradientError: A backward raised, or a gradient was already used by the last step.
        """
        self._forget_if_cleared()
        self.window.seal()
        for record in self.records:
            self._take_truth(record)
        more = [unit for unit in self.units if self.departure.has_more(unit)]
        for unit in more:
            unit.departed = True
        self.departure.seal(self, more)

    def _take_truth(self, record: ParamRecord) -> None:
        grad = record.param.grad
        if record.state is GradientState.UPDATED and not record.holds(grad):
            self.policy.lost(record)
        if grad is None:
            if record.state is not GradientState.ABSENT:
                record.discard()
        elif not record.holds(grad):
            self._refuse(record, grad)
            record.refuse_given("replaced")
            record.discard()
            # a copy: the user may write into that tensor while it is still on its way
            record.addends.append(grad.detach().clone().contiguous())
            record.move(GradientState.OPEN)
            record.param.grad = record.standin
            self.units[record.unit].departed = False
        elif record.state is GradientState.CONSUMED:
            raise GradientError(
                f"step() was called again, but the gradient of {record.label} was used by "
                "the last step()",
                hint="call zero_grad() after step(), then backward, before the next step()",
            )
        elif record.zeroed:  # perhaps after its unit had departed
            self.units[record.unit].departed = False
        elif record.captured is not None:
            raise GradientError(
                f"a hook added to p.grad of {record.label} after its gradient had left",
                hint="change gradients in p.register_hook(...)",
            )

    def present(self) -> list[ParamRecord]:
        """The parameters that have a gradient, in parameter order."""
        return [record for record in self.records if record.state in _PRESENT]

    def zero_grad(self) -> None:
        """Discard everything and begin a new window."""
        self.policy.refuse_discard()
        for record in self.records:
            record.param.grad = None
            record.discard()
        self.new_window()

    def end_window(self) -> None:
        """The step used the window's gradients."""
        self.policy.end_window()
        self.window.reset()

    def new_window(self) -> None:
        """Begin a new window with what every `p.grad` says now."""
        self.policy.refuse_discard()
        self.policy.forget_window()
        self.window.reset()
        for unit in self.units:
            unit.departed = False
        self.departure.discard()
        self._executor.discard()


# In a tuple: membership in a set would hash the states.
_PRESENT = (GradientState.OPEN, GradientState.LANDED, GradientState.UPDATED)
