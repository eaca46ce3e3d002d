"""The manifest: what a checkpoint holds, as frozen values, to JSON and back.

Reading checks everything that can be checked without opening another file, so that whoever has a
`Manifest` may trust its numbers. It knows no tensors' bytes.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from forebay.checkpoint.header import DTYPES, TensorSpec, is_shape
from forebay.checkpoint.parsing import Fields
from forebay.checkpoint.values import decode, encode, parse_json
from forebay.errors import CheckpointError

__all__ = [
    "BLOCK_BYTES",
    "MANIFEST",
    "MAX_MANIFEST_BYTES",
    "FileEntry",
    "Kind",
    "Manifest",
    "ParameterEntry",
    "Role",
    "Slice",
    "tensor_key",
]

MANIFEST: Final = "manifest.json"
# 70 billion parameters in 800 files take some 3 MB; 100,000 experts some 100.
MAX_MANIFEST_BYTES: Final = 256 << 20
# One checksum each: large enough for the disk, small enough that a few fit beside a model.
BLOCK_BYTES: Final = 16 << 20
_FORMAT: Final = "forebay-checkpoint"
_VERSION: Final = 1
_LAST_ENTRY: Final = re.compile(rb',"manifest_crc32":([0-9]{1,10})}\n\Z')
_FILE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}\.safetensors")


class Kind(Enum):
    """What a named tensor of the model is."""

    TRAINED = "trained"
    """A parameter with master and moments."""
    FROZEN = "frozen"
    """A parameter that is not trained."""
    BUFFER = "buffer"
    """A persistent buffer."""


class Role(Enum):
    """What bytes of a named tensor are; the first part of their key in a file."""

    MASTER = "master"
    """fp32 master of a trained parameter; its working weight is this, rounded."""
    EXP_AVG = "exp_avg"
    """fp32 first moment."""
    EXP_AVG_SQ = "exp_avg_sq"
    """fp32 second moment."""
    VALUE = "value"
    """A frozen parameter or buffer in its own dtype."""
    RANDOM = "random"
    """State of a random generator."""


_ROLES: Final = {
    Kind.TRAINED: (Role.MASTER, Role.EXP_AVG, Role.EXP_AVG_SQ),
    Kind.FROZEN: (Role.VALUE,),
    Kind.BUFFER: (Role.VALUE,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Elements `[start, end)` of a flat tensor, and where they are.

    Attributes:
        start: First element.
        end: One past the last.
        file: Name of the file.
        crc32: One checksum for each `BLOCK_BYTES` of the slice's bytes.
    """

    start: int
    end: int
    file: str
    crc32: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEntry:
    """A named tensor of the model.

    Attributes:
        names: All its names in the module tree; the first one is part of its keys.
        kind: What it is.
        shape: Its shape.
        dtype: Dtype in the model, a key of `DTYPES`; masters and moments are F32 all the same.
        group: Index of its optimizer group; None if it is not trained.
        step: Its own count of updates.
        slices: Its bytes by role, in order and without gaps.
    """

    names: tuple[str, ...]
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    group: int | None = None
    step: int = 0
    slices: dict[Role, tuple[Slice, ...]] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return TensorSpec(key="", dtype="F32", shape=self.shape).elements

    def spec(self, role: Role, piece: Slice) -> TensorSpec:
        """The tensor that a slice is in its file: flat, unless it is the whole."""
        whole = piece.start == 0 and piece.end == self.elements
        return TensorSpec(
            key=tensor_key(role, self.names[0], None if whole else (piece.start, piece.end)),
            dtype=self.dtype if role is Role.VALUE else "F32",
            shape=self.shape if whole else (piece.end - piece.start,),
        )


def tensor_key(role: Role, name: str, span: tuple[int, int] | None = None) -> str:
    """A tensor's name in its file."""
    return f"{role.value}/{name}" + ("" if span is None else f"[{span[0]}:{span[1]}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of tensors.

    Attributes:
        name: Its name, in the checkpoint's folder.
        nbytes: Its size.
        header_crc32: Checksum of everything before its data.
    """

    name: str
    nbytes: int
    header_crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but the tensors' bytes.

    Attributes:
        files: The files of tensors.
        parameters: The model's named tensors.
        groups: The optimizer's groups without their parameters.
        rule: What weight decay means: "decoupled" (AdamW) or "l2" (Adam).
        excludes_frozen: Whether frozen parameters were left out on request.
        counters: global_steps, micro_steps, global_samples, skipped_steps.
        loss_scale: The loss scale's state.
        scheduler: The schedule's state, or None.
        random: States of the random generators; tensors among them are in `random_tensors`.
        random_tensors: Tensors of generators, by name.
        data: Where the data goes on, or None.
        config: The configuration that ran.
        model: What else belongs to the model: its Hugging Face configuration, adapters.
        client_state: The user's own.
        writer: Which program wrote it.
    """

    files: tuple[FileEntry, ...]
    parameters: tuple[ParameterEntry, ...]
    groups: tuple[dict[str, Any], ...] = ()
    rule: str = "decoupled"
    excludes_frozen: bool = False
    counters: dict[str, int] = field(default_factory=dict)
    loss_scale: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] | None = None
    random: dict[str, Any] = field(default_factory=dict)
    random_tensors: dict[str, tuple[TensorSpec, Slice]] = field(default_factory=dict)
    data: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    client_state: dict[str, Any] = field(default_factory=dict)
    writer: str = ""

    def to_bytes(self) -> bytes:
        """JSON, with a checksum of itself as its last entry.

        Raises:
            CheckpointError: A value in it is not plain.
        """
        plain = {
            name: encode(getattr(self, name), where=name)
            for name in ("groups", "loss_scale", "scheduler", "random", "data", "config", "model")
        }
        body: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "writer": self.writer,
            "rule": self.rule,
            "excludes_frozen": self.excludes_frozen,
            "counters": self.counters,
            **plain,
            "groups": plain["groups"]["$tuple"],
            "client_state": encode(self.client_state, where="client_state"),
            "files": [
                {"name": f.name, "bytes": f.nbytes, "header_crc32": f.header_crc32}
                for f in self.files
            ],
            "random_tensors": {
                name: {"shape": list(spec.shape), "dtype": spec.dtype, **_slice_json(piece)}
                for name, (spec, piece) in self.random_tensors.items()
            },
            "parameters": [_parameter_json(entry) for entry in self.parameters],
        }
        text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()[:-1]
        return text + b',"manifest_crc32":%d}\n' % zlib.crc32(text)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray, *, what: str) -> Manifest:
        """Read and check a manifest.

        Args:
            data: The file's bytes.
            what: The file, for messages.

        Raises:
            CheckpointError: It is damaged, of another format, or contradicts itself.
        """
        body = parse_json(data, what=what)
        if body.get("format") != _FORMAT:
            raise CheckpointError(f"{what} is no checkpoint of forebay")
        if body.get("version") != _VERSION:
            raise CheckpointError(
                f"{what} has format version {str(body.get('version'))[:20]}, this forebay reads "
                f"{_VERSION}",
                hint="update forebay",
            )
        end = _LAST_ENTRY.search(data)
        if end is None or int(end[1]) != zlib.crc32(data[: end.start()]):
            raise CheckpointError(f"{what} is damaged: its checksum does not match")
        return _read(Fields(body, what=what))


def _slice_json(piece: Slice) -> dict[str, Any]:
    return {
        "start": piece.start,
        "end": piece.end,
        "file": piece.file,
        "crc32": list(piece.crc32),
    }


def _parameter_json(entry: ParameterEntry) -> dict[str, Any]:
    return {
        "names": list(entry.names),
        "kind": entry.kind.value,
        "shape": list(entry.shape),
        "dtype": entry.dtype,
        "group": entry.group,
        "step": entry.step,
        "slices": {
            role.value: [_slice_json(piece) for piece in pieces]
            for role, pieces in entry.slices.items()
        },
    }


def _read(body: Fields) -> Manifest:
    files = tuple(_file(item) for item in body.objects("files"))
    known = {file.name for file in files}
    if len(known) != len(files):
        raise body.error("names a file twice")
    groups = tuple(decode(item.values) for item in body.objects("groups"))
    entries = tuple(
        _parameter(item, files=known, num_groups=len(groups)) for item in body.objects("parameters")
    )
    names = [name for entry in entries for name in entry.names]
    if len(set(names)) != len(names):
        raise body.error("names a parameter twice")
    counters = body.mapping("counters")
    if not all(type(value) is int and value >= 0 for value in counters.values()):
        raise body.error("has a counter that is no count")
    return Manifest(
        files=files,
        parameters=entries,
        groups=groups,
        rule=body.text("rule"),
        excludes_frozen=body.flag("excludes_frozen"),
        counters=counters,
        loss_scale=decode(body.mapping("loss_scale")),
        scheduler=decode(body.mapping_or_none("scheduler")),
        random=decode(body.mapping("random")),
        random_tensors=_random_tensors(body, files=known),
        data=decode(body.mapping_or_none("data")),
        config=decode(body.mapping("config")),
        model=decode(body.mapping("model")),
        client_state=decode(body.mapping("client_state")),
        writer=body.text("writer"),
    )


def _file(item: Fields) -> FileEntry:
    name = item.text("name")
    if not _FILE_NAME.fullmatch(name):
        raise item.error(f"names the file {name[:80]!r}, which is no plain name of tensors")
    return FileEntry(name=name, nbytes=item.size("bytes"), header_crc32=item.size("header_crc32"))


def _shape(item: Fields) -> tuple[int, ...]:
    shape = item.sizes("shape")
    if not is_shape(shape):
        raise item.error("has an impossible shape")
    return tuple(shape)


def _parameter(item: Fields, *, files: set[str], num_groups: int) -> ParameterEntry:
    names = tuple(item.texts("names"))
    if not names:
        raise item.error("has a parameter without a name")
    kind = item.choice("kind", Kind)
    group = item.values.get("group")
    if (kind is Kind.TRAINED) != (type(group) is int) or not 0 <= (group or 0) < max(num_groups, 1):
        raise item.error(f"gives {names[0][:80]!r} a group that does not exist")
    dtype = item.text("dtype")
    if dtype not in DTYPES:
        raise item.error(f"gives {names[0][:80]!r} the unknown dtype {dtype[:20]!r}")
    entry = ParameterEntry(
        names=names,
        kind=kind,
        shape=_shape(item),
        dtype=dtype,
        group=group,
        step=item.size("step"),
    )
    roles = item.child("slices")
    if set(roles.values) != {role.value for role in _ROLES[kind]}:
        raise item.error(f"does not have just the roles of a {kind.value} one in {names[0][:80]!r}")
    for role in _ROLES[kind]:
        pieces = tuple(
            _slice(piece, item=entry.spec(role, _EMPTY).dtype, files=files)
            for piece in roles.objects(role.value)
        )
        _check_cover(pieces, entry=entry, role=role, item=item)
        entry.slices[role] = pieces
    return entry


_EMPTY: Final = Slice(start=0, end=0, file="", crc32=())


def _slice(piece: Fields, *, item: str, files: set[str]) -> Slice:
    start, end, file = piece.size("start"), piece.size("end"), piece.text("file")
    if file not in files:
        raise piece.error(f"has a slice in {file[:80]!r}, which is not among its files")
    crc32 = tuple(piece.sizes("crc32"))
    blocks = -(-(end - start) * DTYPES[item].itemsize // BLOCK_BYTES)
    if start > end or len(crc32) != blocks:
        raise piece.error(f"has a slice from {start} to {end} with {len(crc32)} checksums")
    return Slice(start=start, end=end, file=file, crc32=crc32)


def _check_cover(
    pieces: tuple[Slice, ...], *, entry: ParameterEntry, role: Role, item: Fields
) -> None:
    position = 0
    for piece in pieces:
        if piece.start != position:
            what = "overlapping" if piece.start < position else "missing"
            raise item.error(
                f"has {what} slices of the {role.value} of {entry.names[0][:80]!r} at element "
                f"{min(position, piece.start)}"
            )
        position = piece.end
    if position != entry.elements:
        raise item.error(
            f"has {position} of the {entry.elements} elements of the {role.value} of "
            f"{entry.names[0][:80]!r}"
        )


def _random_tensors(body: Fields, *, files: set[str]) -> dict[str, tuple[TensorSpec, Slice]]:
    found = {}
    for name in body.mapping("random_tensors"):
        item = body.child("random_tensors").child(name)
        spec = TensorSpec(
            key=tensor_key(Role.RANDOM, name),
            dtype=item.choice_text("dtype", DTYPES),
            shape=_shape(item),
        )
        piece = _slice(item, item=spec.dtype, files=files)
        if (piece.start, piece.end) != (0, spec.elements):
            raise item.error(f"has only a part of the random state {name[:80]!r}")
        found[name] = (spec, piece)
    return found
