"""What a rank writes of a checkpoint: every tensor with the place its bytes come from.

Each rank writes the slices that it alone answers for, at every stage. Made between two updates,
after the barrier. It copies only what training may change before it is
read (buffers, random states); everything else is read from where it lives. It writes nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forebay import native
from forebay.checkpoint.header import TensorSpec, dtype_name
from forebay.checkpoint.manifest import OWN_DTYPE, Kind, Manifest, ParameterEntry, Role, tensor_key
from forebay.checkpoint.manifest_json import manifest_bytes
from forebay.checkpoint.portion import Cut, Portion
from forebay.checkpoint.sources import JoinedSource, ReadSource, TensorSource
from forebay.checkpoint.values import is_unicode
from forebay.engine.duty import Duty
from forebay.engine.random_state import RandomState
from forebay.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from forebay.checkpoint.sources import Source
    from forebay.checkpoint.writer import Written
    from forebay.engine.engine import Engine
    from forebay.engine.policy import UpdatePolicy
    from forebay.engine.record import ParamRecord
    from forebay.model.layout import Segment

__all__ = ["NamedTensor", "RunState", "Snapshot", "take_snapshot", "untrained_tensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What belongs to a run beside its tensors; every value is plain.

    Attributes:
        counters: global_steps, micro_steps, global_samples.
        scheduler: The schedule's state, or None.
        data: Where the data goes on, or None.
        config: The configuration that runs.
        client_state: The user's own.
        excludes_frozen: Whether frozen parameters are left out.
    """

    counters: dict[str, int]
    scheduler: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    config: dict[str, Any]
    client_state: dict[str, Any]
    excludes_frozen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor of the model that is not trained.

    Attributes:
        names: All its names.
        kind: Frozen parameter or buffer.
        tensor: The tensor, or what this rank holds of it.
        record: The record of one that comes and goes.
    """

    names: tuple[str, ...]
    kind: Kind
    tensor: torch.Tensor
    record: ParamRecord | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all of it."""
        return tuple(self.tensor.shape) if self.record is None else self.record.slot.shape

    @property
    def slices(self) -> ParamRecord | None:
        """Its record where no rank has all of it."""
        record = self.record
        return record if record is not None and record.part.is_sharded else None

    def write(self, value: torch.Tensor) -> None:
        """Give it new values, whole ones."""
        with torch.no_grad():
            if self.slices is None:
                self.tensor.copy_(value)
            else:
                self.slices.part.store(self.slices.slot, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one rank is to write of a checkpoint.

    Attributes:
        sources: Its tensors: trained ones by unit in the order of the next update, then others.
        cuts: Which piece of what each of them is, but for those of generators.
        versions: (unit or None, name, parameter, version) of each, since users can write them.
        draft: The manifest but for files, slices and random states.
        random: States of random generators.
        random_specs: The tensors of generators.
    """

    sources: tuple[Source, ...]
    cuts: tuple[Cut, ...]
    versions: tuple[tuple[int | None, str, torch.Tensor, int], ...]
    draft: Manifest
    random: dict[str, Any]
    random_specs: dict[str, TensorSpec]

    def portion(self, written: Written) -> Portion:
        """What was written, once it is known where."""
        return Portion.of(
            written, cuts=self.cuts, random=self.random, random_specs=self.random_specs
        )

    def check_untouched(self, owner: int | None) -> None:
        """Raise CheckpointError when a unit's (or other) parameter was written meanwhile."""
        for unit, name, param, version in self.versions:
            if unit == owner and param._version != version:
                raise CheckpointError(
                    f"{name} was changed by hand while a checkpoint was written",
                    hint="call engine.wait_for_checkpoint() before changing weights",
                )


class _Builder:
    """Collects what one rank writes."""

    def __init__(self, duty: Duty, *, policy: UpdatePolicy) -> None:
        self._duty = duty
        self._policy = policy
        self.sources: list[Source] = []
        self.cuts: list[Cut] = []
        self._loads = [0] * duty.size

    def add_trained(self, record: ParamRecord) -> None:
        """This rank's own slices of a parameter; nothing where it has none."""
        piece = self._duty.segment(record)
        if piece.elements:
            self._add(record, Role.MASTER, piece, _master_of(record, piece))
            self._add(record, Role.EXP_AVG, piece, _moment_of(record, piece, Role.EXP_AVG))
            self._add(record, Role.EXP_AVG_SQ, piece, _moment_of(record, piece, Role.EXP_AVG_SQ))
            gathered = self._policy.gathered(record)
            if gathered is not None:
                self._add(record, Role.GATHERED, piece, gathered)
            if self._policy.holds_back(record):
                here = record.part.own_weights[piece.offset : piece.end]
                source = partial(TensorSource, value=here, owner=record.unit)
                self._add(record, Role.IN_FORCE, piece, source)

    def _add(
        self,
        record: ParamRecord,
        role: Role,
        piece: Segment,
        make: Callable[[TensorSpec], Source],
    ) -> None:
        end = piece.start + piece.elements
        is_whole = piece.elements == record.slot.elements
        spec = TensorSpec(
            key=tensor_key(role, record.label, None if is_whole else (piece.start, end)),
            dtype=dtype_name(record.part.dtype, what=record.label) if role in OWN_DTYPE else "F32",
            shape=record.slot.shape if is_whole else (piece.elements,),
        )
        self.sources.append(make(spec))
        self.cuts.append(Cut(record.label, role, piece.start, end, spec.key))

    def add_other(self, entry: ParameterEntry, named: NamedTensor) -> None:
        """A frozen parameter or buffer, written by one of the ranks; buffers by rank 0."""
        if named.slices is not None:
            self._add_slice(named.slices)
            return
        rank = 0
        if named.kind is Kind.FROZEN:  # to the one that has least to write so far
            rank = self._loads.index(min(self._loads))
            self._loads[rank] += named.tensor.nbytes
        name = entry.names[0]
        if rank == self._duty.rank and entry.elements:
            spec = TensorSpec(
                key=tensor_key(Role.VALUE, name), dtype=entry.dtype, shape=entry.shape
            )
            self.sources.append(_other_source(named, spec))
            self.cuts.append(Cut(name, Role.VALUE, 0, entry.elements, spec.key))

    def _add_slice(self, record: ParamRecord) -> None:
        """This rank's own slice of a frozen parameter that no rank has whole."""
        piece = self._duty.segment(record)
        if piece.elements:
            here = record.part.own_weights[piece.offset : piece.end]
            self._add(record, Role.VALUE, piece, partial(TensorSource, value=here))

    def add_random(self, random: RandomState) -> dict[str, TensorSpec]:
        """The tensors of this rank's generators."""
        specs = {}
        for name, value in random.tensors.items():
            specs[name] = TensorSpec(
                key=tensor_key(Role.RANDOM, name), dtype="U8", shape=tuple(value.shape)
            )
            self.sources.append(TensorSource(specs[name], value))
        return specs


def take_snapshot(engine: Engine, run: RunState) -> Snapshot:
    """Describe what this rank writes of a checkpoint; call it after the barrier.

    Raises:
        CheckpointError: Something cannot be saved; names it.
    """
    duty = Duty.of(engine.options.group)
    builder = _Builder(duty, policy=engine.collector.policy)
    entries: dict[int, ParameterEntry] = {}
    trained = (index for index in engine.order if index < len(engine.units))
    for index in trained:
        for record in engine.units[index].records:
            entries[record.index] = _entry_of(record)
            builder.add_trained(record)
    versions: list[tuple[int | None, str, torch.Tensor, int]] = [
        (r.unit, r.label, r.param, r.param._version) for r in engine.collector.records
    ]
    others = []
    for named in untrained_tensors(engine):
        if named.kind is Kind.FROZEN and run.excludes_frozen:
            continue
        others.append(_other(named))
        builder.add_other(others[-1], named)
        if named.kind is Kind.FROZEN:
            versions.append((None, named.names[0], named.tensor, named.tensor._version))
    random = RandomState.capture(engine.accelerator.device, ranks=duty.size).of_rank(duty.rank)
    random_specs = builder.add_random(random)
    draft = Manifest(
        files=(),
        parameters=(*(entries[index] for index in sorted(entries)), *others),
        groups=tuple(_plain_group(group) for group in engine.groups),
        rule=engine.terms.rule.weight_decay.value,
        excludes_frozen=run.excludes_frozen,
        counters={**run.counters, "skipped_steps": engine.skipped_steps},
        loss_scale=engine.options.loss_scale.state_dict(),
        scheduler=run.scheduler,
        random=random.plain,
        data=run.data,
        config=run.config,
        model=_model_values(engine.module),
        policy=engine.collector.policy.plain_state(),
        client_state=run.client_state,
        writer="forebay",
    )
    _refuse_odd(draft)
    return Snapshot(
        sources=tuple(builder.sources),
        cuts=tuple(builder.cuts),
        versions=tuple(versions),
        draft=draft,
        random=random.plain,
        random_specs=random_specs,
    )


def _refuse_odd(draft: Manifest) -> None:
    """Refuse what could not be read back, before anything is written."""
    state = draft.client_state
    if not isinstance(state, dict):
        raise CheckpointError(
            f"client_state is a {type(state).__name__}, and must be a dict",
            hint='give it a name: {"mine": value}',
        )
    for entry in draft.parameters:
        for name in entry.names:
            if not is_unicode(name):
                raise CheckpointError(
                    f"{name!r} cannot be a tensor's name in a checkpoint: it is no valid Unicode"
                )
    manifest_bytes(draft)  # a value that is not plain


def _entry_of(record: ParamRecord) -> ParameterEntry:
    return ParameterEntry(
        names=record.slot.names,
        kind=Kind.TRAINED,
        shape=record.slot.shape,
        dtype=dtype_name(record.part.dtype, what=record.label),
        group=record.group,
        step=record.step,
    )


def _master_of(record: ParamRecord, piece: Segment) -> Callable[[TensorSpec], Source]:
    part, owner = record.part, record.unit
    span = slice(piece.offset, piece.end)
    if part.files is not None:
        return _moment_of(record, piece, Role.MASTER)
    # where the device updated last, the host's mirror of the weight is older than it
    high = (part.own_weights if part.high_is_stale else part.high)[span]
    if part.low is None:
        return partial(TensorSource, value=high, owner=owner)
    join = native.core().join
    return partial(JoinedSource, high=high, low=part.low[span], join=join, owner=owner)


def _moment_of(record: ParamRecord, piece: Segment, role: Role) -> Callable[[TensorSpec], Source]:
    part, owner = record.part, record.unit
    if part.files is not None:
        read = partial(part.read, role.value)
        return partial(ReadSource, read=read, first=piece.offset, owner=owner)
    held = part.read(role.value, piece.offset, piece.end)
    return partial(TensorSource, value=held, owner=owner)


def untrained_tensors(engine: Engine) -> list[NamedTensor]:
    """Frozen parameters and persistent buffers, each once with all its names.

    Parameters that come and go are the tensors in which their weights live.
    """
    trained = {id(record.param) for record in engine.collector.records}
    away = {id(record.param): record for unit in engine.frozen for record in unit.records}
    found: dict[int, tuple[list[str], Kind, torch.Tensor]] = {}
    for prefix, module in engine.module.named_modules():
        dot = f"{prefix}." if prefix else ""
        members = [(name, p, Kind.FROZEN) for name, p in module._parameters.items()]
        members += [
            (name, buffer, Kind.BUFFER)
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        ]
        for name, value, kind in members:
            if value is not None and id(value) not in trained:
                found.setdefault(id(value), ([], kind, value))[0].append(dot + name)
    named = []
    for key, (names, kind, value) in found.items():
        record = away.get(key)
        tensor = value if record is None else record.part.stored(record.slot)
        named.append(NamedTensor(names=tuple(names), kind=kind, tensor=tensor, record=record))
    return named


def _other(named: NamedTensor) -> ParameterEntry:
    value, name = named.tensor.detach(), named.names[0]
    if type(named.tensor.data) is not torch.Tensor or value.layout is not torch.strided:
        raise UnsupportedError(
            f"{name} is a {type(named.tensor.data).__name__}, whose form a checkpoint cannot hold",
            hint="save_checkpoint(exclude_frozen_parameters=True) leaves frozen parameters out",
        )
    dtype = dtype_name(value.dtype, what=name)
    return ParameterEntry(names=named.names, kind=named.kind, shape=named.shape, dtype=dtype)


def _other_source(named: NamedTensor, spec: TensorSpec) -> Source:
    value = named.tensor.detach()
    if named.kind is Kind.BUFFER:
        value = value.clone()  # a forward may change it while it is still to be written
    return TensorSource(spec, value.contiguous())


def _plain_group(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.item() if isinstance(value, torch.Tensor) and not value.ndim else value
        for name, value in group.items()
        if name != "params"
    }


def _model_values(model: nn.Module) -> dict[str, Any]:
    """What an exported folder needs beside tensors, where the model is one of transformers'."""
    values: dict[str, Any] = {"class": type(model).__name__}
    for name in ("config", "generation_config"):
        config = getattr(model, name, None)
        to_json = getattr(config, "to_json_string", None)
        if callable(to_json):
            values[name] = json.loads(str(to_json(use_diff=False)))
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, dict):
        values["adapters"] = {
            str(name): json.loads(json.dumps(config.to_dict(), default=_plain))
            for name, config in adapters.items()
        }
    return values


def _plain(value: Any) -> Any:
    """JSON for what adapters' settings hold beside plain values: sets and enums."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
