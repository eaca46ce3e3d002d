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
from torch.utils._pytree import tree_leaves

from forebay.engine.unit import Unit, WeightState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

__all__ = ["HookActions", "ModuleHooks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HookActions:
    """What the engine does when a hook fires.

    Attributes:
        make_ready: Waits for one unit; a no-op when it is ready.
        on_output: A backward through the root's outputs begins.
        quiesce: The barrier for readers of `state_dict`.
        settle: The pass's last unit is about to compute: staging gives its memory back.
    """

    make_ready: Callable[[Unit], None]
    on_output: Callable[[], None]
    quiesce: Callable[[str], None]
    settle: Callable[[], None]


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
        self._seen: dict[int, int] = {}
        self._order: list[int] = []
        self.order: tuple[int, ...] = tuple(range(len(units)))
        self._fired: set[int] | None = set()
        self._handles: list[RemovableHandle] = []
        self._restores: list[tuple[nn.Module, Any]] = []
        self._owned = self._units_of_modules(owners)
        self._owners = owners
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

    def _attach(self) -> None:
        root = self._root
        self._handles += [
            root.register_forward_pre_hook(self._begin_pass),
            root.register_forward_hook(self._end_pass),
            root.register_state_dict_pre_hook(self._before_state_dict),
            root.register_load_state_dict_pre_hook(self._before_load),
        ]
        covered: dict[int, tuple[nn.Module, list[Unit]]] = {}
        for wrapper in _compiled(root):
            inside = [self._owned[id(m)] for m in wrapper.modules() if id(m) in self._owned]
            units = list({unit.index: unit for _, group in inside for unit in group}.values())
            covered.update({id(module): (module, group) for module, group in inside})
            self._guard_compiled(wrapper, units)
        for key, (module, units) in self._owned.items():
            if key not in covered:
                self._wait_before(module, units, anchor=False)
        for unit in self._units:
            anchor = _anchor(root, unit, self._owners)
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

        self._handles.append(module.register_forward_pre_hook(_before_forward))

    def _wait(self, module: nn.Module, units: Sequence[Unit]) -> None:
        if self._fired is not None:
            self._fired.add(id(module))
        for unit in units:
            if self._seen.get(unit.index) != self._pass:
                self._seen[unit.index] = self._pass
                self._order.append(unit.index)
                if unit.index == self.order[-1]:
                    self._act.settle()
            if unit.state is WeightState.PENDING:
                self._act.make_ready(unit)

    def _begin_pass(self, _module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            self._barrier_disabled()
            return
        self._pass += 1
        self._order = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _barrier_disabled(self) -> None:
        self._act.quiesce("forward of a compiled model")

    def _end_pass(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._order:
            missing = [i for i in range(len(self._units)) if self._seen.get(i) != self._pass]
            self.order = tuple(self._order + missing)
        if torch.is_grad_enabled():
            for leaf in _tensors(output):
                if leaf.requires_grad:
                    leaf.register_hook(self._output_hook)

    def _output_hook(self, _grad: torch.Tensor) -> None:
        self._act.on_output()

    def _before_state_dict(self, *_args: Any) -> None:
        self._act.quiesce("state_dict")

    def _before_load(self, *_args: Any) -> None:
        self._act.quiesce("load_state_dict")

    def learn(self) -> None:
        """After the first backward: wait at an ancestor for weights that are read from outside.

        `nn.MultiheadAttention` reads the weight of its `out_proj` without calling it. Such a unit
        is waited for by the nearest module around it whose hook did fire, since only that can.
        """
        if self._fired is None:
            return
        fired, self._fired = self._fired, None
        parents = {id(c): m for m in self._root.modules() for c in m.children()}
        for unit in self._units:
            for record in unit.records:
                owners = self._owners[record.index]
                if not record.firings or not owners:
                    continue
                if any(id(module) in fired for module in owners):
                    continue
                module = parents.get(id(owners[0]), self._root)
                self._wait_before(module, [unit], anchor=True)

    def detach(self) -> None:
        """Remove every hook and wrapper."""
        for handle in self._handles:
            handle.remove()
        for module, call in self._restores:
            module._compiled_call_impl = call
        self._handles, self._restores = [], []


def _compiled(root: nn.Module) -> Iterator[nn.Module]:
    """Outermost compiled modules below the root."""

    def _walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if type(child).__name__ == "OptimizedModule" or (
                getattr(child, "_compiled_call_impl", None) is not None
            ):
                yield child
            else:
                yield from _walk(child)

    return _walk(root)


def _anchor(root: nn.Module, unit: Unit, owners: Sequence[Sequence[nn.Module]]) -> nn.Module | None:
    """The smallest module that holds all of a unit's first owners."""
    wanted = {id(owners[r.index][0]) for r in unit.records if owners[r.index]}
    if not wanted:
        return None
    anchor = root
    while True:
        for child in anchor.children():
            if wanted <= {id(m) for m in child.modules()}:
                anchor = child
                break
        else:
            return anchor


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested containers and dataclass-like outputs."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from (v for v in vars(leaf).values() if isinstance(v, torch.Tensor))
