"""Module hooks that keep streamed weights on the device while their modules compute.

Every module's forward is a frame. A frame holds the units whose weights its module owns (or is the
smallest module around) until it ends, however it ends. Units that were read on demand inside it
stay too, unless their room is needed. Saved-tensor hooks lie around each frame
(`engine.saved_weights`, [Note: hooks on top]).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from forebay.engine.gone_weights import leave_gone
from forebay.engine.masters import keep_newer, keep_written, refresh_master, settle_stored
from forebay.engine.module_hook import ModuleHook
from forebay.engine.reads import tensors_in
from forebay.engine.refusals import compiled_error
from forebay.engine.same_loads import SameLoads
from forebay.engine.unit import WeightState
from forebay.engine.watched import WatchedParameters
from forebay.errors import PendingWeightError
from forebay.model.compiled import compiled_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from forebay.engine.hooks import ModuleHooks
    from forebay.engine.record import ParamRecord
    from forebay.engine.residency import Residency
    from forebay.engine.saved_weights import SavedWeights
    from forebay.engine.unit import Unit

__all__ = ["StreamingHooks"]


class _Frame:
    """One running forward."""

    __slots__ = ("held", "is_saving", "module", "read")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.held: list[Unit] = []
        self.read: list[Unit] = []
        self.is_saving = False


class _Frames(threading.local):
    """The forwards that run in a thread, outermost first."""

    def __init__(self) -> None:
        self.open: list[_Frame] = []


class StreamingHooks:
    """Hooks of one engine on every module of a model.

    Args:
        root: The user's model.
        residency: Brings weights.
        saved: Hooks on what autograd saves.
        units_of: For each module's id, the units that it holds during its forward.
        members: For each streamed parameter's id, its record and its unit.
        hooks: The hooks that every engine has; a copy of the model passes theirs first.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        residency: Residency,
        saved: SavedWeights,
        units_of: dict[int, tuple[Unit, ...]],
        members: dict[int, tuple[ParamRecord, Unit]],
        hooks: ModuleHooks,
    ) -> None:
        self._root = root
        self._residency = residency
        self._saved = saved
        self._units_of = units_of
        self._members = members
        self._own = _Frames()
        # Weights in state dicts that somebody still has, by parameter and version.
        self._copies: weakref.WeakValueDictionary[tuple[int, int], torch.Tensor] = (
            weakref.WeakValueDictionary()
        )
        # Units that a recomputed function reads outside of any module, by the parameter read.
        self._pinned: dict[int, Unit] = {}
        self._handles: list[RemovableHandle] = []
        # Modules that are being loaded from a state dict, and the weights meant.
        self._loading: dict[nn.Module, list[tuple[str, ParamRecord, Unit]]] = {}
        self._same = SameLoads()
        self._watched: list[nn.Module] = []
        self._hooks = hooks
        self._restores: list[tuple[nn.Module, Any]] = []
        inside = {id(m) for outside in compiled_modules(root) for m in outside.modules()}
        for module in root.modules():
            if id(module) not in inside:
                self._attach(module)
            else:
                self._attach_state(module)
        for outside in compiled_modules(root):
            self._attach_compiled(outside)
        # After the hooks of the modules inside it: some ranks may still need what others have.
        together = self._hook(lambda *_: residency.meet_readers())
        self._handles.append(root.register_state_dict_post_hook(together))

    @property
    def _frames(self) -> list[_Frame]:
        return self._own.open

    def _hook(self, call: Callable[..., Any]) -> ModuleHook:
        return ModuleHook(call, before_copy=self._on_copy)

    def _on_copy(self, memo: dict[int, Any] | None) -> None:
        """The model is being copied (pickled where `memo` is None); see `ModuleHook`."""
        self._hooks.before_copy(memo)
        away = [(r, u) for r, u in self._members.values() if r.pending or r.part.is_sharded]
        if memo is None:
            if away:
                raise PendingWeightError(
                    f"the model was pickled while weights ({away[0][0].label}, ...) were not on "
                    "the device",
                    hint="save model.state_dict(), or pickle copy.deepcopy(model)",
                )
            return
        # Under a key of the memo's own kind: this is called for each hook of each module.
        done = memo.setdefault(id(self), set())
        found = [(r, u) for r, u in away if id(r.param) in memo and id(r.param) not in done]
        if found:
            self._hooks.await_updates()  # they write what is copied from
        for record, unit in found:
            done.add(id(record.param))
            keep_written(record)
            weight = self._whole(record, unit)
            memo[id(record.param)].data = weight if record.part.is_sharded else weight.clone()
        if found:
            self._residency.meet_readers()

    def _attach(self, module: nn.Module) -> None:
        self._handles += [
            module.register_forward_pre_hook(self._hook(self._enter), prepend=True),
            module.register_forward_hook(self._hook(self._leave), always_call=True),
        ]
        self._attach_state(module)
        if self._streamed(module):
            self._watched.append(module)
            module._parameters = WatchedParameters(
                module._parameters, self._on_read, showing=self._showing, held=self._members
            )

    def _attach_compiled(self, module: nn.Module) -> None:
        """What is inside is compiled without any trace of hooks; they stand around it."""
        call = getattr(module, "_compiled_call_impl", None)
        if call is None:  # a wrapper: its own hooks run outside
            self._handles += [
                module.register_forward_pre_hook(self._hook(self._enter), prepend=True),
                module.register_forward_hook(self._hook(self._leave), always_call=True),
            ]
            return

        def _held_call(*args: Any, **kwargs: Any) -> Any:
            self._enter(module, args)
            try:
                return call(*args, **kwargs)
            finally:
                self._leave(module, args, None)

        self._restores.append((module, call))
        module._compiled_call_impl = _held_call

    def _attach_state(self, module: nn.Module) -> None:
        if not self._streamed(module):
            return
        self._handles += [
            module.register_state_dict_post_hook(self._hook(self._show_stored)),
            module.register_load_state_dict_pre_hook(self._hook(self._before_load)),
            module.register_load_state_dict_post_hook(self._hook(self._after_load)),
        ]

    def _streamed(self, module: nn.Module) -> list[tuple[str, ParamRecord, Unit]]:
        """A module's own weights that live on the host: name, record, unit."""
        return [
            (name, *self._members[id(param)])
            for name, param in module._parameters.items()
            if id(param) in self._members
        ]

    def declare(self, module: nn.Module, param: nn.Parameter) -> None:
        """A module reads a weight in its forward, though it does not own it."""
        known = self._units_of.get(id(module), ())
        _, unit = self._members.get(id(param), (None, None))
        if unit is not None and unit not in known:
            self._units_of[id(module)] = (*known, unit)

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            if id(module) in self._units_of:
                self._refuse_compiled()
            return
        if module is self._root and torch._C._current_graph_task_id() < 0:
            self._forget_frames()
            self._unpin_all()
            self._residency.begin_forward()
        frame = _Frame(module)
        self._frames.append(frame)
        for unit in self._units_of.get(id(module), ()):
            self._residency.hold(unit)
            frame.held.append(unit)
        if torch.is_grad_enabled():
            self._saved.push()
            frame.is_saving = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _refuse_compiled(self) -> None:
        raise compiled_error()

    def _leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        if self._frames and self._frames[-1].module is module:
            self._close(self._frames.pop())
            if module is self._root and not self._frames:
                self._residency.away_reads.end(tensors_in(output))

    def _close(self, frame: _Frame) -> None:
        if frame.is_saving:
            self._saved.pop()
        for unit in frame.held:
            self._residency.release(unit)
        for unit in frame.read:
            self._residency.forget(unit)

    def _forget_frames(self) -> None:
        """An interrupt has left frames open: no hook is called for it."""
        while self._frames:
            self._close(self._frames.pop())

    def _show_stored(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        """A state dict refers to weights where they live: on the host."""
        for name, record, unit in self._streamed(module):
            keep_written(record)
            if prefix + name in state:
                state[prefix + name] = self._shown(record, unit)

    def _shown(self, record: ParamRecord, unit: Unit) -> torch.Tensor:
        """`_whole`, and the same tensor under each of a tied weight's names, as savers need."""
        key = record.index, record.param._version
        shown = self._copies.get(key)
        if shown is None:
            shown = self._copies[key] = self._whole(record, unit)
        return shown

    def _whole(self, record: ParamRecord, unit: Unit) -> torch.Tensor:
        """A weight where it lives, or a copy on the host of one that no rank has whole.

        Every rank asks for it then.
        """
        if not record.part.is_sharded:
            return record.part.stored(record.slot)
        self._residency.acquire(unit)
        return record.param.data.detach().to("cpu", copy=True)

    def _before_load(
        self, module: nn.Module, state: dict[str, Any], prefix: str, *_args: Any
    ) -> None:
        """Weights are loaded where they live, and where they are shown if somebody shows them.

        Torch ends with a module after those inside it, which may need a unit that they share.
        """
        streamed = [
            found
            for found in self._streamed(module)
            if not self._residency.pool.is_held(found[2].index)
        ]
        units = {unit.index: unit for _, _, unit in streamed}
        for outer, loaded in list(self._loading.items()):
            if any(unit.index in units for _, _, unit in loaded):
                self._after_load(outer, None)
        for _, record, _ in streamed:
            keep_written(record)
        wholes = [self._whole(record, unit) for _, record, unit in streamed]
        self._residency.drop_all(units.values())
        for (_, record, _), whole in zip(streamed, wholes, strict=True):
            record.param.data = whole
        self._loading[module] = streamed
        self._same.note(((name, record) for name, record, _ in streamed), state, prefix)

    def _after_load(self, module: nn.Module, _incompatible: Any) -> None:
        loaded = self._loading.pop(module, [])
        self._same.confirm((name, record) for name, record, _ in loaded)
        for _, record, _ in loaded:
            written = record.param._version != record.version
            if written or (record.master_is_loaded and not keep_newer(record)):
                if record.part.is_sharded or record.part.weight_files is not None:
                    record.part.store(record.slot, record.param.data)
                settle_stored(record)
            if record.away is not None:
                record.param.data = record.away

    def _on_read(self, param: nn.Parameter) -> None:
        _, unit = self._members.get(id(param), (None, None))
        if unit is None or torch.compiler.is_compiling():
            return
        in_backward = torch._C._current_graph_task_id() >= 0
        if in_backward and torch.is_grad_enabled() and not self._saved.are_pushed:
            # A checkpointed function, not a module: nobody will tell when backward uses this.
            if id(param) not in self._pinned:
                self._residency.hold(unit)
                self._pinned[id(param)] = unit
        elif self._frames:
            frame = self._frames[-1]
            if unit not in frame.held and unit not in frame.read:
                self._residency.read(unit)
                frame.read.append(unit)
        elif unit.state is not WeightState.READY:
            self._residency.show(unit)

    @contextlib.contextmanager
    def _showing(self, param: nn.Parameter, rank: int | None) -> Iterator[None]:
        record, unit = self._members[id(param)]
        with self._residency.showing(unit):
            yield
            if rank is not None:
                self._residency.take_from_rank(param, rank=rank)
            refresh_master(record)

    def gradient_arrived(self, param: nn.Parameter) -> None:
        """Backward has done with a parameter."""
        unit = self._pinned.pop(id(param), None)
        if unit is not None:
            self._residency.release(unit)

    def _unpin_all(self) -> None:
        while self._pinned:
            self._residency.release(self._pinned.popitem()[1])

    def detach(self) -> None:
        """Remove every hook."""
        self._forget_frames()
        self._unpin_all()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module, call in self._restores:
            module._compiled_call_impl = call
        self._restores.clear()
        for module in self._watched:
            streamed = self._streamed(module)
            module._parameters = dict(module._parameters.items())
            if any(record.part.is_sharded for _, record, _ in streamed):
                leave_gone(module)
        self._watched.clear()
