"""The engine: the one place where model, plan, memory, lanes and update rule meet.

It composes; each part does its own work. Both public faces (`forebay.offload` and
`forebay.initialize`) drive this object.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forebay import native
from forebay.accelerators.select import accelerator_for
from forebay.engine.barrier import Barrier
from forebay.engine.build import (
    build_units,
    core_share,
    move_the_rest,
    part_memory,
    place,
    ring_maker,
)
from forebay.engine.collector import Collector
from forebay.engine.executor import Executor
from forebay.engine.files import connect_files
from forebay.engine.fit import refuse_what_does_not_fit
from forebay.engine.frozen import build_frozen, look_at
from forebay.engine.hooks import HookActions, ModuleHooks
from forebay.engine.learned_sums import LearnedSums
from forebay.engine.masters import refresh_master, refresh_unseen
from forebay.engine.options import EngineOptions, Timing
from forebay.engine.policies import make_policy, with_policy_that_pays
from forebay.engine.policy import PolicyParts
from forebay.engine.pool_room import with_pool
from forebay.engine.ranks import connect_ranks, queue_of
from forebay.engine.refusals import refuse_strangers, refuse_taken
from forebay.engine.room import DeviceRoom
from forebay.engine.state_moves import StateMoves
from forebay.engine.step import StepOutcome, Stepper
from forebay.engine.streamer import Streamer
from forebay.engine.streaming import Streaming
from forebay.engine.terms import UpdateTerms
from forebay.engine.unit import NanSource
from forebay.hardware.limits import SwapWatch
from forebay.links.lanes import Lanes
from forebay.links.observer import Moment
from forebay.optim.device_math import math_for
from forebay.optim.rule import AdamRule
from forebay.plan.memory import backlog_bytes
from forebay.plan.program import build_program
from forebay.plan.unit_order import reordered

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from forebay.engine.record import ParamRecord
    from forebay.model.inspect import InspectedModel
    from forebay.plan.program import Program

__all__ = ["Engine"]


class Engine:
    """Trains one model with its state where the options put it.

    Args:
        model: The user's model; its parameters move into forebay's memory.
        groups: The optimizer's parameter groups; shared, never copied.
        rule: The update rule.
        options: What is asked for.

    Attributes:
        ledger: Every byte that forebay placed.
        moves: Brings state off the device between phases, and back.
        order: All units in the order of a forward; the indices of frozen ones follow the others'.
        page_locking: Locks what crosses the link, in the background.
        terms: What the coming update is made with; its `clip_norm` may be set at any time.
        skipped_steps: Steps that changed nothing since a gradient was not finite.

    Raises:
        UnsupportedError: The model or optimizer cannot be honoured.
        BudgetError: The state does not fit; raised before any model memory is touched.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        groups: list[dict[str, Any]],
        rule: AdamRule,
        options: EngineOptions,
    ) -> None:
        self.module = model
        self.options = options
        self.groups = groups
        self.skipped_steps = 0
        self._learned = LearnedSums()
        self.last_outcome: StepOutcome | None = None
        self._swap = SwapWatch()
        self.terms = UpdateTerms(groups, rule=rule, clip_norm=options.clip_norm)
        self.terms.validate()
        inspected = self._plan(model)
        self._allocate(inspected)
        self._connect()
        # Native lanes must stop before the memory that they copy is collected.
        weakref.finalize(self, self.lanes.close)
        weakref.finalize(self, self.ranks.close)
        self.hooks = ModuleHooks(
            model,
            units=self.units,
            owners=inspected.owners,
            actions=HookActions(
                make_ready=self._barrier.make_ready,
                on_output=self.collector.window.touch,
                quiesce=self.quiesce,
                settle=lambda last: self._barrier.settle(self._streamer, everything=last),
                mark=self.lanes.mark,
            ),
        )
        self.streaming.attach(model, owners=inspected.owners, options=options, hooks=self.hooks)
        self.collector.attach(self)
        self._by_param = {id(record.param): record for record in self.collector.records}

    def _plan(self, model: nn.Module) -> InspectedModel:
        """Look, decide and refuse; nothing is touched."""
        options = self.options
        # Before what is away is looked at: it has no value, and looks as if it never had one.
        refuse_taken(model, (param for group in self.groups for param in group["params"]))
        inspected = look_at(model, groups=self.groups, options=options)
        refuse_taken(model, inspected.params)  # with the frozen ones that would come and go
        self.order = inspected.order
        self.accelerator = accelerator_for(options.device)
        device = self.accelerator.device
        placed = place(inspected, options=options, device=device)
        placed = with_pool(placed, root=model, model=inspected, options=options)
        check = partial(refuse_what_does_not_fit, options=options, cpu=device.type == "cpu")
        self.placement = with_policy_that_pays(placed, check=check)
        return inspected

    def _allocate(self, inspected: InspectedModel) -> None:
        """Make the memory and move the model into it."""
        options, device = self.options, self.accelerator.device
        core = native.core()
        self._memory = memory = part_memory(
            self.placement, options=options, accelerator=self.accelerator, core=core
        )
        self.ledger, self.page_locking = memory.ledger, memory.page_locking
        self.cores = core_share(options)
        placement = self.placement
        self.units = build_units(inspected, placement=placement, memory=memory)
        self.frozen = build_frozen(inspected.params, placement=placement, memory=memory)
        move_the_rest(self.module, trained=inspected.params, device=device, cast_to=options.cast_to)
        self.accelerator.trim()
        self.lanes = Lanes(
            core,
            accelerator=self.accelerator,
            cores=self.cores,
            make_ring=ring_maker(self.placement, memory=memory),
            backlog_bytes=backlog_bytes(self.placement),
            fault=options.fault,
        )

    def _connect(self) -> None:
        """Make what works on that memory."""
        options, device = self.options, self.accelerator.device
        self.lanes.observer = options.observe(device)
        self._nans = NanSource(device)
        self._room = DeviceRoom(device, ledger=self.ledger, staging_bytes=options.staging_bytes)
        self._streamer = Streamer(
            lanes=self.lanes, accelerator=self.accelerator, ledger=self.ledger, room=self._room
        )
        every = (*self.units, *self.frozen)
        self._barrier = Barrier(
            every, lanes=self.lanes, nans=self._nans, forget_visits=self._streamer.drop
        )
        self.lanes.ranks = queue_of(options, count=len(self.units), device=device)
        self.streaming = Streaming(
            every,
            placement=self.placement,
            lanes=self.lanes,
            memory=self._memory,
            nans=self._nans,
            barrier=self._barrier,
        )
        self._executor = Executor(
            self.units,
            lanes=self.lanes,
            math=math_for(device, core=self.lanes.core, pool=self.lanes.pool),
            streamer=self._streamer,
            publisher=self.streaming.publisher,
            piece_elements=self.placement.piece_elements,
        )
        connect_files(self._executor, self.placement, memory=self._memory)
        self.ranks = connect_ranks(
            self.units,
            executor=self._executor,
            options=options,
            terms=self.terms,
            on_order=self._follow,
            streaming=self.streaming,
        )
        self._collect()

    def _collect(self) -> None:
        """Make what takes gradients and steps with them."""
        options = self.options
        parts = PolicyParts(
            units=self.units,
            placement=self.placement,
            executor=self._executor,
            terms=self.terms,
            barrier=self._barrier,
            memory=self._memory,
            options=options,
        )
        self.collector = Collector(
            self.units,
            executor=self._executor,
            departure=self.ranks.departure,
            policy=make_policy(parts),
            program=build_program(self.placement, order=self.order),
            expected=self.placement.backwards_per_update,
        )
        residency = self.streaming.residency
        self.moves = StateMoves(
            parts, collector=self.collector, residency=residency, settle=self.settle_masters
        )
        residency.is_last_backward = lambda: self.collector.window.will_be_last
        self._stepper = Stepper(
            self.collector,
            executor=self._executor,
            terms=self.terms,
            options=options,
            barrier=self._barrier,
        )

    def current_program(self) -> Program:
        """The program in force, with the loads that passes like the last ones need; built anew."""
        return build_program(self.placement, order=self.order, uses=self.streaming.residency.uses)

    @property
    def traffic(self) -> dict[Any, int]:
        """Bytes moved so far over each lane."""
        return dict(self._executor.traffic)

    def record_of(self, param: torch.Tensor) -> ParamRecord | None:
        """The record behind a parameter; None when forebay does not train it."""
        return self._by_param.get(id(param))

    def receive_gradient(self, record: ParamRecord, param: torch.Tensor) -> None:
        """Autograd produced a gradient of a trained parameter."""
        self._barrier.refuse_closed("backward")
        self.moves.refuse_gradient(record)
        self.streaming.gradient_arrived(record.param)
        self.collector.receive(record, param)

    def step(self, *, divisor: float = 1.0) -> StepOutcome:
        """Update with the window's gradients, or skip.

        Returns once the decision is made; weights arrive unit by unit, unless synchronous.

        Args:
            divisor: What the gradients are too large by, beside the loss scale.

        Raises:
            GradientError: The window is spoiled, or no new gradients came since the last step.
            EngineClosedError: The engine is closed.
            TransferError: A transfer failed; the engine is closed.
        """
        self.collector.window.bury_dead()
        self._barrier.refuse_closed("step()")
        self._barrier.refuse_away("step()")
        self._barrier.meet_readers()
        self.lanes.mark(Moment.STEP_BEGIN)
        self.hooks.learn()
        refuse_strangers(self.groups, known=self._by_param)
        self.streaming.take_over()
        self.collector.policy.check(divisor=divisor)
        self.ranks.departure.ran(self.hooks.order)
        outcome = self._stepper.run(divisor=divisor)
        self._room.observe()
        self.last_outcome = outcome
        if not outcome.applied:
            self.skipped_steps += 1
            self.streaming.residency.away_reads.suspect()
        self._learned.plan(self)
        if self.options.timing is Timing.SYNCHRONOUS:
            self.quiesce("a synchronous step")
        else:
            for unit in self.units:
                if unit.eager:
                    self._barrier.make_ready(unit)
        self.streaming.step_ended()
        self.lanes.reap()
        self._swap.poll()
        self.page_locking.report()
        self._stepper.conclude(outcome)
        self.lanes.mark(Moment.STEP_END)
        return outcome

    def _follow(self, order: tuple[int, ...]) -> None:
        """Units ran in this order; the next forward will need them so."""
        self.order = reordered(self.order, order)
        self.collector.program = build_program(self.placement, order=self.order)

    def expect_backwards(self, count: int) -> None:
        """Plan for `count` backwards per update from the next window on; legal between windows.

        More than one are summed in fp32, so the landing places become wide, once.

        Raises:
            BudgetError: The wide landing places do not fit; the plan stays as it was.
        """
        self._learned.expect(self, count)

    def zero_grad(self) -> None:
        """Discard the window's gradients and begin a new one."""
        self._barrier.refuse_closed("zero_grad()")
        self.collector.zero_grad()

    def refresh(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Take over weights that were written through `p.data` since the last step.

        Args:
            params: Those that were written. None means all of them; the bits that masters have
                beyond their weights are then gone everywhere.
        """
        self.quiesce("refresh")
        if params is None:
            chosen = list(self.collector.records)
        else:
            chosen = [record for param in params if (record := self.record_of(param)) is not None]
        for record in chosen:
            refresh_unseen(record)

    def settle_masters(self) -> None:
        """Let masters follow weights that the user changed, for readers before the next step."""
        self.quiesce("reading weights with their masters")
        self.streaming.take_over()
        for record in self.collector.records:
            if not record.master_is_loaded:
                refresh_master(record)

    def quiesce(self, reason: str) -> None:
        """The one barrier: every weight is ready and every lane is idle when it returns.

        Args:
            reason: Who reads, for the message when the engine is closed.

        Raises:
            EngineClosedError: The engine failed earlier.
            TransferError: It fails now.
        """
        self._barrier.quiesce(reason)
        self.collector.policy.settle()

    def synchronize(self) -> None:
        """Wait until all updates are done and all weights are new, and moves of state are over."""
        if self._barrier.away:
            self.moves.finish()
            return
        self._barrier.refuse_closed("synchronize")
        self.collector.policy.finish(self.collector.program)
        self.quiesce("synchronize")

    def close(self) -> None:
        """Finish what is on its way, give memory back and remove every hook. Idempotent.

        The model keeps its newest weights as ordinary tensors.
        """
        try:
            self.moves.bring_home()
            if not self._barrier.is_closed:
                self.collector.policy.finish(self.collector.program)
            failure = self._barrier.failure
            if self._barrier.shut():
                self.ranks.part(failure=failure)
        finally:
            self.moves.close()
            self.ranks.close()
            self.streaming.detach()
            self.hooks.detach()
            self.collector.detach()
            for record in self.collector.records:
                if record.holds(record.param.grad):
                    record.param.grad = None
            for unit in (*self.units, *self.frozen):
                for part in unit.parts:
                    part.close()
            self._executor.close()
            self.collector.policy.close()
            self.page_locking.wait()
