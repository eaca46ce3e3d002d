"""Hooks on modules: a unit's weights are waited for just before a module reads them.

They wait and record the order of units; they compute nothing.

[Note: compiled modules] A hook on a module that was compiled before never fires. So a block
inside an `OptimizedModule` is waited for by a hook on that wrapper, and one compiled in place
(`block.compile()`) by a wrapper around its compiled call. Hooks that dynamo traces later (blocks
or the root compiled after `offload`) wait in a disabled function, a graph break at the entry
of the unit's outermost module; inside it they are silent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from forebay.engine.module_hook import ModuleHook
from forebay.engine.one_pass import OnePass
from forebay.engine.reads import first_reads, next_number, tensors_in
from forebay.engine.same_loads import SameLoads
from forebay.engine.unit import Unit, WeightState
from forebay.errors import PendingWeightError, UnsupportedError
from forebay.links.observer import Moment
from forebay.model.compiled import compiled_modules
from forebay.model.tree import smallest_around

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from forebay.engine.record import ParamRecord

__all__ = ["HookActions", "ModuleHooks"]


# Passes whose graph is looked at for early reads; the first shows them, unless weights are frozen
# or branches not taken at first.
_GRAPHS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HookActions:
    """What the engine does when a hook fires.

    Attributes:
        make_ready: Waits for one unit; a no-op when it is ready.
        on_output: A backward through the root's outputs begins.
        quiesce: The barrier for readers of `state_dict`.
        settle: A unit is about to compute; True for the pass's last one, by when staging has to
            have given its memory back.
        mark: A pass, or a unit in it, begins or ends.
    """

    make_ready: Callable[[Unit], None]
    on_output: Callable[[], None]
    quiesce: Callable[[str], None]
    settle: Callable[[bool], None]
    mark: Callable[[Moment, str], None]


class ModuleHooks:
    """All module hooks of one engine.

    Args:
        root: The user's model.
        units: Every unit by index.
        owners: For each parameter index, the modules that hold it.
        actions: What the hooks do.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        units: Sequence[Unit],
        owners: Sequence[Sequence[nn.Module]],
        actions: HookActions,
    ) -> None:
        self._root = root
        self._units = units
        self._act = actions
        self._pass = 0
        self.one_pass = OnePass()
        self._seen: dict[int, int] = {}
        self._order: list[int] = []
        self.order: tuple[int, ...] = tuple(range(len(units)))
        # When each module was called in this pass (in autograd's numbers) and each unit waited
        # for, until it is known for every parameter who waits for it.
        self._fired: dict[int, int] = {}
        self._waited: dict[int, int] = {}
        self._graphs_to_read = _GRAPHS
        self._unlearned = {record.index for unit in units for record in unit.records}
        self._waits: dict[int, set[int]] = {}
        self._handles: list[RemovableHandle] = []
        self._notes: list[RemovableHandle] = []
        self._restores: list[tuple[nn.Module, Any]] = []
        self._owned = self._units_of_modules(owners)
        self._owners = owners
        self._same = SameLoads()
        self._wait_disabled = torch.compiler.disable(self._wait)
        self._attach()

    def _units_of_modules(
        self, owners: Sequence[Sequence[nn.Module]]
    ) -> dict[int, tuple[nn.Module, list[Unit]]]:
        owned: dict[int, tuple[nn.Module, list[Unit]]] = {}
        for unit in self._units:
            for record in unit.records:
                for module in owners[record.index]:
                    entry = owned.setdefault(id(module), (module, []))
                    if unit not in entry[1]:
                        entry[1].append(unit)
        return owned

    def _hook(self, call: Callable[..., Any]) -> ModuleHook:
        return ModuleHook(call, before_copy=self.before_copy)

    def _attach(self) -> None:
        root = self._root
        self._handles += [
            root.register_forward_pre_hook(self._hook(self._begin_pass)),
            root.register_forward_hook(self._hook(self._end_pass)),
        ]
        for module in {id(m): m for m in [root, *(m for m, _ in self._owned.values())]}.values():
            self._handles += [
                module.register_state_dict_pre_hook(self._hook(self._before_state_dict)),
                module.register_load_state_dict_pre_hook(self._hook(self._before_load)),
                module.register_load_state_dict_post_hook(self._hook(self._after_load)),
            ]
        self._notes = [
            module.register_forward_pre_hook(self._hook(self._note)) for module in root.modules()
        ]
        covered: dict[int, tuple[nn.Module, list[Unit]]] = {}
        for wrapper in compiled_modules(root):
            inside = [self._owned[id(m)] for m in wrapper.modules() if id(m) in self._owned]
            units = list({unit.index: unit for _, group in inside for unit in group}.values())
            covered.update({id(module): (module, group) for module, group in inside})
            self._guard_compiled(wrapper, units)
        for key, (module, units) in self._owned.items():
            if key not in covered:
                self._wait_before(module, units, anchor=False)
        for unit in self._units:
            first = [owners[0] for r in unit.records if (owners := self._owners[r.index])]
            anchor = smallest_around(root, first)
            if anchor is not None and id(anchor) not in covered and anchor is not root:
                self._wait_before(anchor, [unit], anchor=True)

    def _guard_compiled(self, module: nn.Module, units: Sequence[Unit]) -> None:
        call = getattr(module, "_compiled_call_impl", None)
        if call is None:  # an OptimizedModule: its own hooks run outside the compiled region
            self._wait_before(module, units, anchor=True)
            return

        def _waiting_call(*args: Any, **kwargs: Any) -> Any:
            self._wait(module, units)
            return call(*args, **kwargs)

        self._restores.append((module, call))
        module._compiled_call_impl = _waiting_call

    def _wait_before(self, module: nn.Module, units: Sequence[Unit], *, anchor: bool) -> None:
        def _before_forward(hooked: nn.Module, _args: Any) -> None:
            if torch.compiler.is_compiling():
                if anchor:
                    self._wait_disabled(hooked, units)
                return
            self._wait(hooked, units)

        self._waits.setdefault(id(module), set()).update(unit.index for unit in units)
        self._handles.append(module.register_forward_pre_hook(self._hook(_before_forward)))

    def _note(self, module: nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._fired.setdefault(id(module), next_number())

    def _wait(self, module: nn.Module, units: Sequence[Unit]) -> None:
        if self._unlearned:
            self._fired.setdefault(id(module), next_number())
        for unit in units:
            is_new = self._seen.get(unit.index) != self._pass
            if is_new:
                self._seen[unit.index] = self._pass
                self._order.append(unit.index)
                if self._unlearned:
                    self._waited[unit.index] = next_number()
                self._act.settle(unit.index == self.order[-1])
            if unit.state is WeightState.PENDING:
                self._act.make_ready(unit)
            if is_new:
                self._act.mark(Moment.UNIT_BEGIN, unit.name)

    def _begin_pass(self, _module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            self._barrier_disabled()
            return
        if not self.one_pass.begins():
            return
        self._pass += 1
        self._order = []
        self._fired.clear()
        self._waited.clear()
        self._act.mark(Moment.FORWARD_BEGIN, "")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _barrier_disabled(self) -> None:
        self._act.quiesce("forward of a compiled model")

    def _end_pass(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self.one_pass.is_shared:
            return
        self.end_pass()
        if torch.is_grad_enabled():
            for leaf in tensors_in(output):
                if leaf.grad_fn is not None:
                    leaf.register_hook(self._output_hook)
            if self._unlearned and self._graphs_to_read:
                self._graphs_to_read -= 1
                self._learn_reads(first_reads(tensors_in(output)))

    def end_pass(self) -> None:
        """The pass's forwards have ended, or the first of those that take turns has."""
        self._act.mark(Moment.FORWARD_END, "")
        if self._order:
            missing = [i for i in range(len(self._units)) if self._seen.get(i) != self._pass]
            self.order = tuple(self._order + missing)

    def _output_hook(self, _grad: torch.Tensor) -> None:
        self._act.on_output()

    def _before_state_dict(self, *_args: Any) -> None:
        self._act.quiesce("state_dict")

    def _before_load(
        self, module: nn.Module, state: dict[str, Any], prefix: str, *_args: Any
    ) -> None:
        self._act.quiesce("load_state_dict")
        self._same.note(self._resident(module), state, prefix)

    def _resident(self, module: nn.Module) -> list[tuple[str, ParamRecord]]:
        """A module's own weights that live on the device, by name."""
        _, units = self._owned.get(id(module), (module, []))
        found = {
            id(record.param): record
            for unit in units
            if not unit.streams_weights
            for record in unit.records
        }
        named = module._parameters.items()
        return [(name, found[id(param)]) for name, param in named if id(param) in found]

    def _after_load(self, module: nn.Module, _incompatible: Any) -> None:
        self._same.confirm(self._resident(module))
        _, units = self._owned.get(id(module), (module, []))
        kept = {id(param) for param in module._parameters.values()}
        for record in (record for unit in units for record in unit.records):
            owned = any(owner is module for owner in self._owners[record.index])
            if owned and id(record.param) not in kept:
                raise UnsupportedError(
                    f"{record.label} was replaced by another parameter, which forebay does not "
                    "train",
                    hint="call load_state_dict without assign=True",
                )

    def before_copy(self, memo: dict[int, Any] | None) -> None:
        """The model is being copied (pickled where `memo` is None); see `ModuleHook`.

        Of weights that live elsewhere the hooks that know them take care.
        """
        units = [unit for unit in self._units if not unit.streams_weights]
        pending = [r for unit in units for r in unit.records if r.pending]
        if not pending:
            return
        self.await_updates()
        if memo is None:
            raise PendingWeightError(
                f"the model was pickled while new weights ({pending[0].label}, ...) were on "
                "their way",
                hint="call optimizer.synchronize() first, or save model.state_dict()",
            )
        for record in pending:
            if id(record.param) in memo:
                memo[id(record.param)].data = record.param.data.clone()

    def await_updates(self) -> None:
        """The barrier for copies of the model: every weight is the newest where it lives."""
        self._act.quiesce("a copy of the model")

    def _learn_reads(self, reads: dict[int, int]) -> None:
        """After a pass: wait earlier for weights that were read before anybody waited."""
        parents = self._parents()
        for unit in self._units:
            waited = self._waited.get(unit.index)
            for record in unit.records:
                read = reads.get(id(record.param))
                if read is not None and (waited is None or read < waited):
                    called = {key for key, number in self._fired.items() if number <= read}
                    self._learn_owners(unit, self._owners[record.index], called, parents)

    def _parents(self) -> dict[int, nn.Module]:
        return {id(c): m for m in self._root.modules() for c in m.children()}

    def learn(self) -> None:
        """After a backward: wait at an ancestor for weights that are read from outside.

        `nn.MultiheadAttention` reads the weight of its `out_proj` without calling it. Such a unit
        is waited for by the nearest module around it that was called, and by `step()` itself
        where there is none.
        """
        if not self._unlearned:
            return
        fired, parents = set(self._fired), self._parents()
        for unit in self._units:
            for record in unit.records:
                if record.index in self._unlearned and record.firings:
                    self._unlearned.discard(record.index)
                    self._learn_owners(unit, self._owners[record.index], fired, parents)
        if not self._unlearned:
            _remove(self._notes)

    def _learn_owners(
        self,
        unit: Unit,
        owners: Iterable[nn.Module],
        fired: set[int],
        parents: dict[int, nn.Module],
    ) -> None:
        for owner in owners:
            module: nn.Module | None = owner
            while module is not None and id(module) not in fired:
                module = parents.get(id(module))
            if module is None:
                unit.eager = True
            elif unit.index not in self._waits.get(id(module), ()):
                self._wait_before(module, [unit], anchor=True)

    def detach(self) -> None:
        """Remove every hook and wrapper."""
        _remove(self._handles)
        _remove(self._notes)
        for module, call in self._restores:
            module._compiled_call_impl = call
        self._restores = []


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
