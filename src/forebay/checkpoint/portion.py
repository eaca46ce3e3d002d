"""What one rank wrote of a checkpoint, and how the portions of all ranks make the manifest.

Each rank writes its own slices into files of its own, and says where they are in a file beside
them, which is gone once rank 0 has made the manifest of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from forebay.checkpoint.header import TensorSpec
from forebay.checkpoint.manifest import (
    EXTRA_ROLES,
    ROLES,
    FileEntry,
    Manifest,
    ParameterEntry,
    Role,
    Slice,
)
from forebay.checkpoint.values import decode, encode
from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.checkpoint.writer import Written

__all__ = ["Cut", "Portion", "assemble", "file_name", "portion_name"]


class Cut(NamedTuple):
    """Elements `[start, end)` of one role of a named tensor, which one rank writes.

    Attributes:
        name: The tensor's first name.
        role: Which of its roles.
        start: First element.
        end: One past the last.
        key: Its name in its file.
    """

    name: str
    role: Role
    start: int
    end: int
    key: str


@dataclass(frozen=True, slots=True)
class Portion:
    """What one rank wrote.

    Attributes:
        files: Its files.
        slices: (name, role, slice) of each piece of a named tensor.
        random: States of random generators, as plain values.
        random_tensors: Tensors of generators, by name.
    """

    files: tuple[FileEntry, ...]
    slices: tuple[tuple[str, Role, Slice], ...]
    random: dict[str, Any] = field(default_factory=dict)
    random_tensors: dict[str, tuple[TensorSpec, Slice]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        written: Written,
        *,
        cuts: Sequence[Cut],
        random: dict[str, Any],
        random_specs: dict[str, TensorSpec],
    ) -> Portion:
        """Where everything is, once it is written."""

        def place(key: str, start: int, end: int) -> Slice:
            file, checksums = written.places[key]
            return Slice(start=start, end=end, file=file, checksums=checksums)

        return cls(
            written.files,
            tuple((cut.name, cut.role, place(cut.key, cut.start, cut.end)) for cut in cuts),
            random,
            {
                name: (spec, place(spec.key, 0, spec.elements))
                for name, spec in random_specs.items()
            },
        )

    def as_bytes(self) -> bytes:
        """For the file beside this rank's tensors."""
        body = {
            "files": [[f.name, f.nbytes, f.header_checksum] for f in self.files],
            "slices": [[name, role.value, _plain(piece)] for name, role, piece in self.slices],
            "random": encode(self.random, where="random"),
            "random_tensors": [
                [name, spec.key, spec.dtype, list(spec.shape), _plain(piece)]
                for name, (spec, piece) in self.random_tensors.items()
            ],
        }
        return json.dumps(body, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Portion:
        """What `as_bytes` gave, in the same save."""
        body = json.loads(data)
        return cls(
            tuple(
                FileEntry(name=name, nbytes=nbytes, header_checksum=checksum)
                for name, nbytes, checksum in body["files"]
            ),
            tuple((name, Role(role), _slice(piece)) for name, role, piece in body["slices"]),
            decode(body["random"]),
            {
                name: (TensorSpec(key=key, dtype=dtype, shape=tuple(shape)), _slice(piece))
                for name, key, dtype, shape, piece in body["random_tensors"]
            },
        )


def _plain(piece: Slice) -> list[Any]:
    return [piece.start, piece.end, piece.file, list(piece.checksums)]


def _slice(plain: list[Any]) -> Slice:
    start, end, file, checksums = plain
    return Slice(start=start, end=end, file=file, checksums=tuple(checksums))


def file_name(index: int, *, rank: int, size: int) -> str:
    """The name of one of a rank's files of tensors."""
    return (
        f"tensors-{index:05d}.safetensors"
        if size == 1
        else (f"rank{rank:05d}-{index:05d}.safetensors")
    )


def portion_name(rank: int) -> str:
    """The name of the file that says what a rank wrote, while a checkpoint is being saved."""
    return f"rank{rank:05d}.json"


def assemble(draft: Manifest, portions: Sequence[Portion]) -> Manifest:
    """The manifest of what all ranks wrote.

    Args:
        draft: Everything but files, slices and random states.
        portions: By rank.

    Raises:
        CheckpointError: The portions leave gaps or overlap: the ranks do not save one model.
    """
    pieces: dict[tuple[str, Role], list[Slice]] = {}
    random: dict[str, Any] = {}
    random_tensors: dict[str, tuple[TensorSpec, Slice]] = {}
    for portion in portions:
        for name, role, piece in portion.slices:
            pieces.setdefault((name, role), []).append(piece)
        random.update(portion.random)
        random_tensors.update(portion.random_tensors)
    return replace(
        draft,
        files=tuple(file for portion in portions for file in portion.files),
        parameters=tuple(_with_slices(entry, pieces) for entry in draft.parameters),
        random=random,
        random_tensors=random_tensors,
    )


def _with_slices(
    entry: ParameterEntry, pieces: dict[tuple[str, Role], list[Slice]]
) -> ParameterEntry:
    slices = {}
    extra = [role for role in EXTRA_ROLES[entry.kind] if (entry.names[0], role) in pieces]
    for role in (*ROLES[entry.kind], *extra):
        found = sorted(pieces.get((entry.names[0], role), ()), key=lambda piece: piece.start)
        ends = [0, *(piece.end for piece in found)]
        if [*(piece.start for piece in found), entry.elements] != ends:
            raise CheckpointError(
                f"the ranks wrote elements {[(p.start, p.end) for p in found][:4]} of the "
                f"{entry.elements} of the {role.value} of {entry.names[0]}",
                hint="every rank trains the same model, and saves it at the same point",
            )
        slices[role] = tuple(found)
    return replace(entry, slices=slices)
