"""From a checkpoint into an engine: straight to where each byte lives, whatever the layout.

First everything is compared and verified; nothing changes before that is done. Then the state is
written piece by piece. A disk that fails in between closes the engine, as a failed update does.
"""

from __future__ import annotations

import copy
import zlib
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from forebay.checkpoint.header import DTYPES
from forebay.checkpoint.manifest import Kind, Role
from forebay.engine.duty import Duty
from forebay.engine.random_state import RandomState
from forebay.engine.snapshot import NamedTensor, untrained_tensors
from forebay.errors import CheckpointError, ForebayError
from forebay.optim.master import split
from forebay.optim.reference import round_to

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay.checkpoint.manifest import Manifest, ParameterEntry
    from forebay.checkpoint.reader import Checkpoint
    from forebay.engine.engine import Engine
    from forebay.engine.record import ParamRecord
    from forebay.optim.loss_scale import LossScale

__all__ = ["Match", "Scope", "match", "restore", "restore_in_force", "write_master"]

# 4 MiB of fp32; splitting takes some 24 bytes of temporary memory per element.
_PIECE: Final = 1 << 20
_MOMENTS: Final = (Role.EXP_AVG, Role.EXP_AVG_SQ)


class Scope(Enum):
    """How much of a checkpoint is loaded."""

    EVERYTHING = "everything"
    """Weights with their masters, moments, step counts, groups, loss scale and random states."""
    WEIGHTS = "weights"
    """Weights with their masters; moments and counts stay as they are."""


@dataclass(frozen=True, slots=True)
class Match:
    """Which tensor of a checkpoint goes where.

    Attributes:
        trained: Trained parameters.
        others: Frozen parameters and buffers.
        scope: How much is loaded.
    """

    trained: tuple[tuple[ParamRecord, ParameterEntry], ...]
    others: tuple[tuple[NamedTensor, ParameterEntry], ...]
    scope: Scope

    @property
    def roles(self) -> frozenset[Role]:
        """What is read."""
        weights = {Role.MASTER, Role.VALUE}
        return frozenset(Role if self.scope is Scope.EVERYTHING else weights)

    def verify(self, checkpoint: Checkpoint, duty: Duty) -> None:
        """Read this rank's share of all bytes and compare checksums; all ranks' shares are all.

        A rank's share of a trained parameter is what no other rank answers for.

        Raises:
            CheckpointError: A file is damaged.
        """
        if duty.size == 1:
            checkpoint.verify(self.roles)
            return
        own = {id(entry): duty.segment(record) for record, entry in self.trained}

        def _picks(entry: ParameterEntry | None, first: int, last: int) -> bool:
            mine = own.get(id(entry))
            if mine is None or entry is None:  # the ranks take turns
                turn = 0 if entry is None else zlib.crc32(entry.names[0].encode())
                return (turn + first // _PIECE) % duty.size == duty.rank
            return first < mine.start + mine.elements and mine.start < last

        checkpoint.verify(self.roles, picks=_picks)


def match(engine: Engine, checkpoint: Checkpoint, *, scope: Scope, is_strict: bool) -> Match:
    """Compare a checkpoint with an engine; changes nothing.

    Args:
        engine: Where to load.
        checkpoint: From where.
        scope: How much.
        is_strict: Whether every name on either side must be on the other too.

    Raises:
        CheckpointError: They do not fit; names what and why.
    """
    manifest = checkpoint.manifest
    by_name = {name: entry for entry in manifest.parameters for name in entry.names}
    used: set[int] = set()
    missing: list[str] = []
    trained, others = [], []
    for record in engine.collector.records:
        entry = _find(by_name, record.slot.names, record.slot.shape)
        if entry is None:
            missing.append(record.label)
        else:
            _refuse_other_kind(record.param, entry)
            used.add(id(entry))
            trained.append((record, entry))
    for named in untrained_tensors(engine):
        entry = _find(by_name, named.names, named.shape)
        if entry is not None:
            _refuse_other_kind(named.tensor, entry)
            used.add(id(entry))
            others.append((named, entry))
        elif named.kind is not Kind.FROZEN or not manifest.excludes_frozen:
            missing.append(named.names[0])
    unused = [entry.names[0] for entry in manifest.parameters if id(entry) not in used]
    if is_strict and (missing or unused):
        raise CheckpointError(
            f"{checkpoint.folder} is of another model: "
            + "; ".join(
                f"{len(names)} {what}, the first is {names[0]}"
                for names, what in ((missing, "tensors are missing"), (unused, "are unknown here"))
                if names
            ),
            hint="load_module_strict=False loads what both have",
        )
    found = Match(tuple(trained), tuple(others), scope)
    if scope is Scope.EVERYTHING:
        _check_optimizer(engine, manifest, found, what=str(checkpoint.folder))
    return found


def _find(
    by_name: dict[str, ParameterEntry], names: Iterable[str], shape: tuple[int, ...]
) -> ParameterEntry | None:
    entry = next((by_name[name] for name in names if name in by_name), None)
    if entry is not None and entry.shape != shape:
        raise CheckpointError(
            f"{entry.names[0]} has the shape {list(entry.shape)} in the checkpoint and "
            f"{list(shape)} in the model"
        )
    return entry


def _refuse_other_kind(tensor: torch.Tensor, entry: ParameterEntry) -> None:
    """Whole numbers never become fractions, nor the other way round."""
    saved = DTYPES[entry.dtype]
    if saved is not tensor.dtype and not (saved.is_floating_point and tensor.is_floating_point()):
        raise CheckpointError(
            f"{entry.names[0]} has the dtype {saved} in the checkpoint and {tensor.dtype} in the "
            "model"
        )


def _check_optimizer(engine: Engine, manifest: Manifest, found: Match, *, what: str) -> None:
    hint = "load_optimizer_states=False loads the weights alone"
    rule = engine.terms.rule
    if manifest.rule != rule.weight_decay.value:
        raise CheckpointError(
            f"{what} was trained with {manifest.rule} weight decay, this optimizer has "
            f"{rule.weight_decay.value}",
            hint=hint,
        )
    if len(manifest.groups) != len(engine.groups):
        raise CheckpointError(
            f"{what} has {len(manifest.groups)} parameter groups, this optimizer "
            f"{len(engine.groups)}",
            hint=hint,
        )
    pairs = zip(engine.groups, manifest.groups, strict=True)
    try:
        rule.validate_all([{**group, **saved} for group, saved in pairs])
    except ForebayError as error:
        raise CheckpointError(f"{what} has an impossible group: {error.message}") from error
    for record, entry in found.trained:
        if entry.kind is not Kind.TRAINED:
            raise CheckpointError(f"{record.label} was not trained in {what}", hint=hint)
        if entry.group != record.group:
            raise CheckpointError(
                f"{record.label} was in parameter group {entry.group} in {what}, and is in "
                f"{record.group}",
                hint=hint,
            )
    for _, entry in found.others:
        if entry.kind is Kind.TRAINED:
            raise CheckpointError(
                f"{entry.names[0]} was trained in {what} and is not trained here", hint=hint
            )
    try:
        _take_loss_scale(copy.copy(engine.options.loss_scale), manifest)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{what} has an impossible loss scale: {error}") from error
    rank = Duty.of(engine.options.group).rank
    RandomState.for_rank(rank, plain=manifest.random, tensors=lambda _: None).check()


def _take_loss_scale(loss_scale: LossScale, manifest: Manifest) -> None:
    """Go on with a scale of the same kind; a run in another precision starts with its own."""
    if manifest.loss_scale.keys() == loss_scale.state_dict().keys():
        loss_scale.load_state_dict(manifest.loss_scale)


def restore(engine: Engine, checkpoint: Checkpoint, found: Match) -> None:
    """Write a checkpoint's state into an engine; call it after `match` and `verify`.

    The open window is discarded.

    Raises:
        CheckpointError: A file cannot be read any more; the engine is closed.
    """
    duty = Duty.of(engine.options.group)
    random = RandomState()
    if found.scope is Scope.EVERYTHING:
        names = checkpoint.manifest.random_tensors
        random = RandomState.for_rank(
            duty.rank,
            plain=checkpoint.manifest.random,
            tensors=lambda name: checkpoint.random_tensor(name) if name in names else None,
        )
        random.check()
    engine.quiesce("load_checkpoint")
    engine.synchronize()  # what the checkpoint lacks keeps the newest weights that it has
    engine.streaming.stored_changed()
    engine.zero_grad()
    try:
        for record, entry in found.trained:
            _restore_record(record, entry, checkpoint, scope=found.scope)
        for named, entry in found.others:
            _restore_other(named, entry, checkpoint)
    except BaseException as error:
        engine._barrier.fail(f"loading {checkpoint.folder} stopped half way: {error}")
        raise
    if found.scope is Scope.EVERYTHING:
        _restore_numbers(engine, checkpoint.manifest)
        _restore_policy(engine, checkpoint, found)
        random.restore(engine.accelerator.device, ranks=duty.size)
    engine.accelerator.synchronize()


def _restore_numbers(engine: Engine, manifest: Manifest) -> None:
    for group, saved in zip(engine.groups, manifest.groups, strict=True):
        for name, value in saved.items():
            if isinstance(group.get(name), torch.Tensor):
                group[name].fill_(value)
            elif name != "params":
                group[name] = value
    _take_loss_scale(engine.options.loss_scale, manifest)
    engine.skipped_steps = manifest.counters.get("skipped_steps", 0)


def _restore_policy(engine: Engine, checkpoint: Checkpoint, found: Match) -> None:
    entries = {record.index: entry for record, entry in found.trained}

    def _gathered(record: ParamRecord) -> torch.Tensor | None:
        entry, held = entries.get(record.index), record.segment
        if entry is None or Role.GATHERED not in entry.slices:
            return None
        return checkpoint.read(entry, Role.GATHERED, held.start, held.start + held.elements)

    engine.collector.policy.restore(checkpoint.manifest.policy, _gathered)


def _restore_record(
    record: ParamRecord, entry: ParameterEntry, checkpoint: Checkpoint, *, scope: Scope
) -> None:
    part, slot = record.part, record.slot
    part.await_readers()
    shown = part.weight(slot) if record.away is None else record.away
    if slot.elements and record.param.data_ptr() != shown.data_ptr():
        record.param.data = shown  # the user had assigned p.data
    role = Role.MASTER if entry.kind is Kind.TRAINED else Role.VALUE
    part.sync_high()
    held = record.segment
    for start in range(held.start, held.start + held.elements, _PIECE):
        end = min(start + _PIECE, held.start + held.elements)
        master = checkpoint.read(entry, role, start, end).float()
        write_master(record, start, master)
        if scope is Scope.EVERYTHING:
            for moment in _MOMENTS:
                value = checkpoint.read(entry, moment, start, end)
                part.write(moment.value, held.offset + start - held.start, value)
    if scope is Scope.EVERYTHING:
        record.step = entry.step
    record.master_is_loaded = False
    record.loaded = None
    torch.autograd.graph.increment_version([record.param])
    record.rebase()


def restore_in_force(engine: Engine, checkpoint: Checkpoint, found: Match) -> bool:
    """Put back weights that are older than their masters; call it when all ranks have the newer.

    Returns:
        Whether there are any: the ranks' slices of them are to be gathered then.
    """
    policy = engine.collector.policy
    if found.scope is not Scope.EVERYTHING or not policy.continues(checkpoint.manifest.policy):
        return False
    held = [(record, entry) for record, entry in found.trained if Role.IN_FORCE in entry.slices]
    for record, entry in held:
        older = partial(_write_in_force, record, entry, checkpoint)
        policy.hold_back(record, older)
    return bool(held)


def _write_in_force(record: ParamRecord, entry: ParameterEntry, checkpoint: Checkpoint) -> None:
    held = record.segment
    for start in range(held.start, held.start + held.elements, _PIECE):
        end = min(start + _PIECE, held.start + held.elements)
        values = checkpoint.read(entry, Role.IN_FORCE, start, end)
        record.part.write_own_weights(held.offset + start - held.start, values)


def write_master(record: ParamRecord, start: int, master: torch.Tensor) -> None:
    """The fp32 master, in whatever form it is kept, and the working weight: it, rounded.

    Args:
        record: The parameter.
        start: The first of its elements; this rank holds the state of all of them.
        master: fp32, flat.
    """
    part, held = record.part, record.segment
    first = held.offset + start - held.start
    here = slice(first, first + master.numel())
    if part.low is not None:
        high, low = split(master)
        part.low[here] = low.to(part.low.device)
        part.write_own_weights(here.start, high)
        if not part.high_is_weight:
            part.high[here] = high.to(part.high.device)
        return
    part.write_own_weights(here.start, round_to(master, part.dtype))
    if not part.high_is_weight:
        part.write("master", here.start, master)


def _restore_other(named: NamedTensor, entry: ParameterEntry, checkpoint: Checkpoint) -> None:
    role = Role.MASTER if entry.kind is Kind.TRAINED else Role.VALUE
    if named.slices is not None:
        _restore_slices(named.slices, entry, checkpoint, role=role)
        return
    tensor = named.tensor
    with torch.no_grad():
        for start in range(0, entry.elements, _PIECE):
            end = min(start + _PIECE, entry.elements)
            value = checkpoint.read(entry, role, start, end)
            if entry.kind is Kind.TRAINED:
                value = round_to(value, tensor.dtype)
            if tensor.is_contiguous():
                tensor.view(-1)[start:end] = value.to(tensor.device)
            else:  # its elements have no one order in memory: whole, once
                whole = checkpoint.read(entry, role, 0, entry.elements)
                _copy_once(tensor, whole.view(entry.shape))
                break


def _restore_slices(
    record: ParamRecord, entry: ParameterEntry, checkpoint: Checkpoint, *, role: Role
) -> None:
    part, held = record.part, record.segment
    for start in range(held.start, held.start + held.elements, _PIECE):
        end = min(start + _PIECE, held.start + held.elements)
        value = checkpoint.read(entry, role, start, end)
        if entry.kind is Kind.TRAINED:
            value = round_to(value, part.dtype)
        part.write_own_weights(held.offset + start - held.start, value)


def _copy_once(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`copy_` where an expanded tensor has one place for all elements along an axis."""
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor, value = tensor.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
    tensor.copy_(value)
