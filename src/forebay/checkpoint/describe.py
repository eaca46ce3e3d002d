"""What a checkpoint holds, and how two differ: plain values for people and for `--json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from forebay.checkpoint.manifest import OWN_DTYPE, Kind, Role
from forebay.units_of_measure import counted, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.checkpoint.manifest import ParameterEntry
    from forebay.checkpoint.reader import Checkpoint

__all__ = ["compare", "comparison_lines", "describe", "description_lines", "is_same"]

# Elements that are compared at once.
_PIECE: Final = 4 << 20
_SHOWN: Final = 20


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint holds; verify it first to know that it is whole."""
    manifest = checkpoint.manifest
    by_kind = {
        kind.value: {
            "tensors": len(members),
            "elements": sum(entry.elements for entry in members),
            "dtypes": sorted({entry.dtype for entry in members}),
        }
        for kind in Kind
        if (members := [entry for entry in manifest.parameters if entry.kind is kind])
    }
    steps = [entry.step for entry in manifest.parameters if entry.kind is Kind.TRAINED]
    return {
        "path": str(checkpoint.folder),
        "bytes": sum(file.nbytes for file in manifest.files),
        "files": len(manifest.files),
        "model": manifest.model.get("class"),
        "tensors": by_kind,
        "tied": sum(len(entry.names) > 1 for entry in manifest.parameters),
        "excludes_frozen": manifest.excludes_frozen,
        "counters": manifest.counters,
        "updates_of_parameters": [min(steps, default=0), max(steps, default=0)],
        "weight_decay": manifest.rule,
        "groups": [
            {name: group.get(name) for name in ("lr", "betas", "eps", "weight_decay")}
            for group in manifest.groups
        ],
        "loss_scale": manifest.loss_scale.get("scale"),
        "scheduler": manifest.scheduler,
        "random": sorted([*manifest.random, *manifest.random_tensors]),
        "data": manifest.data,
        "client_state": sorted(manifest.client_state),
        "writer": manifest.writer,
    }


def description_lines(found: dict[str, Any]) -> Iterator[str]:
    """`describe`'s values as lines; names in it are a stranger's, and control nothing."""
    return map(_printable, _lines(found))


def _printable(line: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"checkpoint     {found['path']}"
    yield (
        f"whole          yes: {format_bytes(found['bytes'])} in {counted(found['files'], 'file')}, "
        "every checksum matches"
    )
    if found["model"]:
        yield f"model          {found['model']}"
    for kind, values in found["tensors"].items():
        counts = f"{values['elements']:,} elements in {counted(values['tensors'], 'tensor')}"
        yield f"{kind:<14} {counts} ({', '.join(values['dtypes'])})"
    if found["tied"]:
        yield f"tied           {found['tied']} tensors have several names"
    if found["excludes_frozen"]:
        yield "frozen         left out on request"
    for name, value in found["counters"].items():
        yield f"{name:<14} {value}"
    low, high = found["updates_of_parameters"]
    yield f"updates        {low} to {high} per parameter"
    for index, group in enumerate(found["groups"]):
        numbers = ", ".join(f"{name} {value}" for name, value in group.items())
        yield f"group {index:<8} {numbers} ({found['weight_decay']} decay)"
    for name in ("loss_scale", "scheduler", "data"):
        if found[name] is not None:
            yield f"{name:<14} {found[name]}"
    if found["client_state"]:
        yield f"client_state   {', '.join(found['client_state'])}"


def compare(left: Checkpoint, right: Checkpoint) -> dict[str, Any]:
    """How two checkpoints differ, to the bit; memory is bounded by a few pieces."""
    ours = {entry.names[0]: entry for entry in left.manifest.parameters}
    theirs = {entry.names[0]: entry for entry in right.manifest.parameters}
    tensors = []
    same = 0
    for name in [name for name in ours if name in theirs]:
        found = _compare_entries(left, ours[name], right, theirs[name])
        if found:
            tensors.append({"name": name, **found})
        else:
            same += 1
    numbers = {}
    for part in ("counters", "groups", "loss_scale", "scheduler", "data", "config", "client_state"):
        pair = getattr(left.manifest, part), getattr(right.manifest, part)
        numbers.update({path: list(values) for path, values in _differences(part, *pair)})
    return {
        "left": str(left.folder),
        "right": str(right.folder),
        "only_left": sorted(ours.keys() - theirs.keys()),
        "only_right": sorted(theirs.keys() - ours.keys()),
        "same_tensors": same,
        "different_tensors": tensors,
        "different_values": numbers,
        "random_states_differ": left.manifest.random != right.manifest.random,
    }


def is_same(found: dict[str, Any]) -> bool:
    """Whether `compare` found no difference."""
    return not any(
        found[name]
        for name in (
            "only_left",
            "only_right",
            "different_tensors",
            "different_values",
            "random_states_differ",
        )
    )


def _compare_entries(
    left: Checkpoint, ours: ParameterEntry, right: Checkpoint, theirs: ParameterEntry
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("kind", "shape", "dtype", "step", "group"):
        pair = getattr(ours, name), getattr(theirs, name)
        if pair[0] != pair[1]:
            found[name] = [getattr(value, "value", value) for value in pair]
    if ours.shape != theirs.shape or ours.kind is not theirs.kind:
        return found
    for role in ours.slices:
        if role not in theirs.slices or (role in OWN_DTYPE and ours.dtype != theirs.dtype):
            continue
        largest = _largest_difference(left, ours, right, theirs, role)
        if largest is not None:
            found[role.value] = largest
    return found


def _largest_difference(
    left: Checkpoint,
    ours: ParameterEntry,
    right: Checkpoint,
    theirs: ParameterEntry,
    role: Role,
) -> float | None:
    """The largest |a - b| of a role; None where every bit is the same."""
    sums = [
        (
            checkpoint.manifest.checksum,
            [(piece.start, piece.end, piece.checksums) for piece in entry.slices[role]],
        )
        for checkpoint, entry in ((left, ours), (right, theirs))
    ]
    if sums[0] == sums[1]:
        return None
    largest, differs = 0.0, False
    for start in range(0, ours.elements, _PIECE):
        end = min(start + _PIECE, ours.elements)
        a, b = left.read(ours, role, start, end), right.read(theirs, role, start, end)
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            differs = True
            largest = max(largest, float((a.double() - b.double()).abs().nan_to_num().max()))
    return largest if differs else None


def _differences(path: str, left: Any, right: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(left, dict) and isinstance(right, dict):
        for name in sorted(left.keys() | right.keys()):
            yield from _differences(f"{path}.{name}", left.get(name), right.get(name))
    elif isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        for index, pair in enumerate(zip(left, right, strict=True)):
            yield from _differences(f"{path}[{index}]", *pair)
    elif repr(left) != repr(right):
        yield path, (left, right)


def comparison_lines(found: dict[str, Any]) -> Iterator[str]:
    """`compare`'s values as lines, as `description_lines`."""
    return map(_printable, _comparison(found))


def _comparison(found: dict[str, Any]) -> Iterator[str]:
    yield f"left   {found['left']}"
    yield f"right  {found['right']}"
    for side in ("left", "right"):
        names = found[f"only_{side}"]
        if names:
            yield f"{len(names)} tensors only {side}, the first is {names[0]}"
    different = found["different_tensors"]
    yield f"{found['same_tensors']} tensors are the same to the bit, {len(different)} differ"
    for entry in different[:_SHOWN]:
        facts = ", ".join(_fact(name, value) for name, value in entry.items() if name != "name")
        yield f"  {entry['name']}: {facts}"
    if len(different) > _SHOWN:
        yield f"  and {len(different) - _SHOWN} more (--json lists all)"
    for path, (left, right) in list(found["different_values"].items())[:_SHOWN]:
        yield f"  {path}: {left} -> {right}"
    if found["random_states_differ"]:
        yield "  random states differ"


def _fact(name: str, value: Any) -> str:
    return (
        f"{name} {value[0]} -> {value[1]}" if isinstance(value, list) else f"{name} by {value:.3g}"
    )
