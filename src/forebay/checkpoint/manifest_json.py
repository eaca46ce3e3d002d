"""The manifest's file: JSON that ends in a checksum of itself.

Reading checks everything that can be checked without opening another file, so that whoever has a
`Manifest` may trust its numbers.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from forebay.checkpoint.checksum import Checksum
from forebay.checkpoint.header import DTYPES, TensorSpec, is_shape
from forebay.checkpoint.manifest import (
    BLOCK_BYTES,
    EXTRA_ROLES,
    ROLES,
    FileEntry,
    Kind,
    Manifest,
    ParameterEntry,
    Role,
    Slice,
    tensor_key,
)
from forebay.checkpoint.parsing import Fields
from forebay.checkpoint.values import decode, encode, parse_json
from forebay.errors import CheckpointError

__all__ = ["MAX_MANIFEST_BYTES", "manifest_bytes", "parse_manifest"]

# 70 billion parameters in 800 files take some 3 MB; 100,000 experts some 100.
MAX_MANIFEST_BYTES: Final = 256 << 20
_FORMAT: Final = "forebay-checkpoint"
# Versions that are read; the last one is written. They differ in the checksum alone, whose name
# is part of the entries' names.
_VERSIONS: Final = {1: Checksum.CRC32, 2: Checksum.CRC32C}
_VERSION_OF: Final = {checksum: version for version, checksum in _VERSIONS.items()}
_LAST_ENTRY: Final = re.compile(rb',"manifest_([a-z0-9]{1,20})":([0-9]{1,10})}\n\Z')
_FILE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}\.safetensors")


def manifest_bytes(manifest: Manifest) -> bytes:
    """JSON, with a checksum of itself as its last entry.

    Raises:
        CheckpointError: A value in it is not plain.
    """
    algorithm = manifest.checksum.value
    plain = {
        name: encode(getattr(manifest, name), where=name)
        for name in (
            "groups",
            "loss_scale",
            "scheduler",
            "random",
            "data",
            "config",
            "model",
            "policy",
        )
    }
    body: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION_OF[manifest.checksum],
        "writer": manifest.writer,
        "rule": manifest.rule,
        "excludes_frozen": manifest.excludes_frozen,
        "counters": manifest.counters,
        **plain,
        "groups": plain["groups"]["$tuple"],
        "client_state": encode(manifest.client_state, where="client_state"),
        "files": [
            {"name": f.name, "bytes": f.nbytes, f"header_{algorithm}": f.header_checksum}
            for f in manifest.files
        ],
        "random_tensors": {
            name: {"shape": list(spec.shape), "dtype": spec.dtype, **_slice_json(piece, algorithm)}
            for name, (spec, piece) in manifest.random_tensors.items()
        },
        "parameters": [_parameter_json(entry, algorithm) for entry in manifest.parameters],
    }
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return text + f',"manifest_{algorithm}":{manifest.checksum.of(text)}}}\n'.encode()


def parse_manifest(data: bytes | bytearray, *, what: str) -> Manifest:
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
    version = body.get("version")
    if type(version) is not int or version not in _VERSIONS:
        raise CheckpointError(
            f"{what} has format version {str(version)[:20]}, this forebay reads "
            f"{' and '.join(map(str, _VERSIONS))}",
            hint="update forebay",
        )
    checksum = _VERSIONS[version]
    end = _LAST_ENTRY.search(data)
    if (
        end is None
        or end[1].decode() != checksum.value
        or int(end[2]) != checksum.of(data[: end.start()])
    ):
        raise CheckpointError(f"{what} is damaged: its checksum does not match")
    return _read(Fields(body, what=what), checksum)


def _slice_json(piece: Slice, algorithm: str) -> dict[str, Any]:
    return {
        "start": piece.start,
        "end": piece.end,
        "file": piece.file,
        algorithm: list(piece.checksums),
    }


def _parameter_json(entry: ParameterEntry, algorithm: str) -> dict[str, Any]:
    return {
        "names": list(entry.names),
        "kind": entry.kind.value,
        "shape": list(entry.shape),
        "dtype": entry.dtype,
        "group": entry.group,
        "step": entry.step,
        "slices": {
            role.value: [_slice_json(piece, algorithm) for piece in pieces]
            for role, pieces in entry.slices.items()
        },
    }


@dataclass(frozen=True, slots=True)
class _Known:
    """What slices are checked against."""

    files: frozenset[str]
    checksum: Checksum


def _read(body: Fields, checksum: Checksum) -> Manifest:
    files = tuple(_file(item, checksum) for item in body.objects("files"))
    known = _Known(frozenset(file.name for file in files), checksum)
    if len(known.files) != len(files):
        raise body.error("names a file twice")
    groups = tuple(_decoded(item) for item in body.objects("groups"))
    entries = tuple(
        _parameter(item, known=known, num_groups=len(groups)) for item in body.objects("parameters")
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
        loss_scale=_decoded(body.child("loss_scale")),
        scheduler=_decoded_or_none(body, "scheduler"),
        random=_decoded(body.child("random")),
        random_tensors=_random_tensors(body, known),
        data=_decoded_or_none(body, "data"),
        config=_decoded(body.child("config")),
        model=_decoded(body.child("model")),
        policy=_decoded_or_none(body, "policy") if "policy" in body.values else None,
        client_state=_decoded(body.child("client_state")),
        writer=body.text("writer"),
        checksum=checksum,
    )


def _decoded(item: Fields) -> dict[str, Any]:
    value = decode(item.values)
    if not isinstance(value, dict):
        raise item.error("has a tuple or a number where entries belong")
    return value


def _decoded_or_none(body: Fields, name: str) -> dict[str, Any] | None:
    return None if body.mapping_or_none(name) is None else _decoded(body.child(name))


def _file(item: Fields, checksum: Checksum) -> FileEntry:
    name = item.text("name")
    if not _FILE_NAME.fullmatch(name):
        raise item.error(f"names the file {name[:80]!r}, which is no plain name of tensors")
    return FileEntry(
        name=name,
        nbytes=item.size("bytes"),
        header_checksum=item.size(f"header_{checksum.value}"),
    )


def _shape(item: Fields) -> tuple[int, ...]:
    shape = item.sizes("shape")
    if not is_shape(shape):
        raise item.error("has an impossible shape")
    return tuple(shape)


def _parameter(item: Fields, *, known: _Known, num_groups: int) -> ParameterEntry:
    names = tuple(item.texts("names"))
    if not names:
        raise item.error("has a parameter without a name")
    kind = item.choice("kind", Kind)
    group = item.values.get("group")
    is_proper = type(group) is int and 0 <= group < num_groups
    if not (is_proper if kind is Kind.TRAINED else group is None):
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
    needed, extra = ({role.value for role in some[kind]} for some in (ROLES, EXTRA_ROLES))
    if not needed <= set(roles.values) <= needed | extra:
        raise item.error(f"does not have just the roles of a {kind.value} one in {names[0][:80]!r}")
    for role in (role for role in Role if role.value in roles.values):
        pieces = tuple(
            _slice(piece, dtype=entry.spec(role, _EMPTY).dtype, known=known)
            for piece in roles.objects(role.value)
        )
        _check_cover(pieces, entry=entry, role=role, item=item)
        entry.slices[role] = pieces
    return entry


_EMPTY: Final = Slice(start=0, end=0, file="", checksums=())


def _slice(piece: Fields, *, dtype: str, known: _Known) -> Slice:
    start, end, file = piece.size("start"), piece.size("end"), piece.text("file")
    if file not in known.files:
        raise piece.error(f"has a slice in {file[:80]!r}, which is not among its files")
    checksums = tuple(piece.sizes(known.checksum.value))
    blocks = -(-(end - start) * DTYPES[dtype].itemsize // BLOCK_BYTES)
    if start > end or len(checksums) != blocks:
        raise piece.error(f"has a slice from {start} to {end} with {len(checksums)} checksums")
    return Slice(start=start, end=end, file=file, checksums=checksums)


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


def _random_tensors(body: Fields, known: _Known) -> dict[str, tuple[TensorSpec, Slice]]:
    found = {}
    for name in body.mapping("random_tensors"):
        item = body.child("random_tensors").child(name)
        spec = TensorSpec(
            key=tensor_key(Role.RANDOM, name),
            dtype=item.choice_text("dtype", DTYPES),
            shape=_shape(item),
        )
        piece = _slice(item, dtype=spec.dtype, known=known)
        if (piece.start, piece.end) != (0, spec.elements):
            raise item.error(f"has only a part of the random state {name[:80]!r}")
        found[name] = (spec, piece)
    return found
