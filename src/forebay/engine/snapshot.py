"""What a checkpoint of an engine holds: every tensor with the place its bytes come from.

Made between two updates, after the barrier. It copies only what training may change before it is
read (buffers, random states); everything else is read from where it lives. It writes nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forebay import native
from forebay.checkpoint.header import TensorSpec, dtype_name
from forebay.checkpoint.manifest import Kind, Manifest, ParameterEntry, Role, Slice, tensor_key
from forebay.checkpoint.manifest_json import manifest_bytes
from forebay.checkpoint.sources import JoinedSource, ReadSource, TensorSource
from forebay.engine.random_state import RandomState
from forebay.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from forebay.checkpoint.sources import Source
    from forebay.checkpoint.writer import Written
    from forebay.engine.engine import Engine
    from forebay.engine.record import ParamRecord

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
        tensor: The tensor.
    """

    names: tuple[str, ...]
    kind: Kind
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A checkpoint that is not written yet.

    Attributes:
        sources: Every tensor: trained ones by unit in the order of the next update, then others.
        versions: (unit or None, name, parameter, version) of each, since users can write them.
        draft: The manifest but for files and slices.
        random_specs: The tensors of generators.
    """

    sources: tuple[Source, ...]
    versions: tuple[tuple[int | None, str, torch.Tensor, int], ...]
    draft: Manifest
    random_specs: dict[str, TensorSpec]

    def manifest(self, written: Written) -> Manifest:
        """The manifest, once it is known where everything was written."""
        entries = tuple(_with_slices(entry, written) for entry in self.draft.parameters)
        random = {name: (spec, _slice(spec, written)) for name, spec in self.random_specs.items()}
        return replace(self.draft, files=written.files, parameters=entries, random_tensors=random)

    def check_untouched(self, owner: int | None) -> None:
        """Raise CheckpointError when a unit's (or other) parameter was written meanwhile."""
        for unit, name, param, version in self.versions:
            if unit == owner and param._version != version:
                raise CheckpointError(
                    f"{name} was changed by hand while a checkpoint was written",
                    hint="call engine.wait_for_checkpoint() before changing weights",
                )


def _with_slices(entry: ParameterEntry, written: Written) -> ParameterEntry:
    roles = (Role.MASTER, Role.EXP_AVG, Role.EXP_AVG_SQ)
    whole = Slice(start=0, end=entry.elements, file="", checksums=())
    return replace(
        entry,
        slices={
            role: (_slice(entry.spec(role, whole), written),)
            for role in (roles if entry.kind is Kind.TRAINED else (Role.VALUE,))
        },
    )


def _slice(spec: TensorSpec, written: Written) -> Slice:
    file, checksums = written.places[spec.key]
    return Slice(start=0, end=spec.elements, file=file, checksums=checksums)


def take_snapshot(engine: Engine, run: RunState) -> Snapshot:
    """Describe everything that a checkpoint holds; call it after the barrier.

    Raises:
        CheckpointError: Something cannot be saved; names it.
    """
    sources: list[Source] = []
    entries: dict[int, ParameterEntry] = {}
    for index in engine._order:
        for record in engine.units[index].records:
            entries[record.index] = _entry_of(record)
            sources.extend(_sources_of(record))
    versions: list[tuple[int | None, str, torch.Tensor, int]] = [
        (r.unit, r.label, r.param, r.param._version) for r in engine.collector.records
    ]
    others = []
    for named in untrained_tensors(engine.module, engine.collector.records):
        if named.kind is Kind.FROZEN and run.excludes_frozen:
            continue
        entry, source = _other(named)
        others.append(entry)
        sources.append(source)
        if named.kind is Kind.FROZEN:
            versions.append((None, named.names[0], named.tensor, named.tensor._version))
    random = RandomState.capture()
    random_specs = {}
    for name, value in random.tensors.items():
        spec = TensorSpec(key=tensor_key(Role.RANDOM, name), dtype="U8", shape=tuple(value.shape))
        random_specs[name] = spec
        sources.append(TensorSource(spec, value))
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
        client_state=run.client_state,
        writer="forebay",
    )
    manifest_bytes(draft)  # a value that is not plain is refused before anything is written
    return Snapshot(
        sources=tuple(sources), versions=tuple(versions), draft=draft, random_specs=random_specs
    )


def _entry_of(record: ParamRecord) -> ParameterEntry:
    return ParameterEntry(
        names=record.slot.names,
        kind=Kind.TRAINED,
        shape=record.slot.shape,
        dtype=dtype_name(record.part.dtype, what=record.label),
        group=record.group,
        step=record.step,
    )


def _sources_of(record: ParamRecord) -> Iterator[Source]:
    part, slot, owner = record.part, record.slot, record.unit
    span = slice(slot.offset, slot.end)

    def spec(role: Role) -> TensorSpec:
        return TensorSpec(key=tensor_key(role, record.label), dtype="F32", shape=slot.shape)

    if part.files is not None:
        for role in (Role.MASTER, Role.EXP_AVG, Role.EXP_AVG_SQ):
            read = partial(part.read, role.value)
            yield ReadSource(spec(role), read, first=slot.offset, owner=owner)
        return
    # where the device updated last, the host's mirror of the weight is older than it
    high = (part.weights if part.high_is_stale else part.high)[span]
    if part.low is None:
        yield TensorSource(spec(Role.MASTER), high, owner=owner)
    else:
        yield JoinedSource(
            spec(Role.MASTER), high, part.low[span], join=native.core().join, owner=owner
        )
    yield TensorSource(spec(Role.EXP_AVG), part.exp_avg[span], owner=owner)
    yield TensorSource(spec(Role.EXP_AVG_SQ), part.exp_avg_sq[span], owner=owner)


def untrained_tensors(model: nn.Module, records: list[ParamRecord]) -> list[NamedTensor]:
    """Frozen parameters and persistent buffers, each once with all its names."""
    trained = {id(record.param) for record in records}
    found: dict[int, tuple[list[str], Kind, torch.Tensor]] = {}
    for prefix, module in model.named_modules():
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
    return [
        NamedTensor(names=tuple(names), kind=kind, tensor=value)
        for names, kind, value in found.values()
    ]


def _other(named: NamedTensor) -> tuple[ParameterEntry, Source]:
    value, name = named.tensor.detach(), named.names[0]
    if type(named.tensor.data) is not torch.Tensor or value.layout is not torch.strided:
        raise UnsupportedError(
            f"{name} is a {type(named.tensor.data).__name__}, whose form a checkpoint cannot hold",
            hint="save_checkpoint(exclude_frozen_parameters=True) leaves frozen parameters out",
        )
    dtype = dtype_name(value.dtype, what=name)
    if named.kind is Kind.BUFFER:
        value = value.clone()  # a forward may change it while it is still to be written
    entry = ParameterEntry(
        names=named.names, kind=named.kind, shape=tuple(value.shape), dtype=dtype
    )
    spec = TensorSpec(key=tensor_key(Role.VALUE, name), dtype=dtype, shape=tuple(value.shape))
    return entry, TensorSource(spec, value.contiguous())


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
