"""From a checkpoint to a Hugging Face folder: its weights alone, streamed, in 16 or 32 bits.

It needs no model and no engine: names, shapes and the model's configuration are in the manifest.
Tied weights are written once, under their first name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from forebay.checkpoint.companions import Links, copy_tokenizer, find_tokenizer
from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.header import DTYPES, TensorSpec
from forebay.checkpoint.manifest import Kind, Role
from forebay.checkpoint.reader import stored_dtype
from forebay.checkpoint.sources import round_into
from forebay.checkpoint.writer import PIECE_BYTES, Staging, TensorWriter, plan_files
from forebay.errors import CheckpointError, ConfigError, ForebayError
from forebay.hardware.reason import reason_of

if TYPE_CHECKING:
    from pathlib import Path

    from forebay.checkpoint.manifest import Manifest, ParameterEntry
    from forebay.checkpoint.reader import Checkpoint
    from forebay.checkpoint.sources import Source

__all__ = ["EXPORT_DTYPES", "Exported", "export"]

EXPORT_DTYPES: Final = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_TORCH_NAMES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# transformers' own size of a file.
_FILE_BYTES: Final = 5_000_000_000
_PIECES: Final = 4
# 1 MiB of fp32 for each thread that rounds.
_PIECE: Final = 1 << 18
_KEPT: Final = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote.

    Attributes:
        path: The folder.
        files: Files of tensors.
        tensors: How many.
        nbytes: Their bytes.
        is_adapter: Whether only a PEFT adapter was written, since only it was trained.
        has_config: Whether the folder has the model's configuration.
        has_tokenizer: Whether it has a tokenizer.
    """

    path: str
    files: int
    tensors: int
    nbytes: int
    is_adapter: bool
    has_config: bool
    has_tokenizer: bool


class _Weight:
    """A weight of a checkpoint, rounded to what it is written in."""

    owner: int | None = None

    def __init__(self, checkpoint: Checkpoint, entry: ParameterEntry, spec: TensorSpec) -> None:
        self.spec = spec
        self._checkpoint = checkpoint
        self._entry = entry
        self._role = Role.MASTER if entry.kind is Kind.TRAINED else Role.VALUE

    def view(self, begin: int, end: int) -> memoryview | None:
        """Nowhere: it is in a file."""
        del begin, end
        return None

    def fill(self, begin: int, end: int, *, into: memoryview) -> None:
        """Read and round."""
        del end  # as much as there is room for
        dtype = DTYPES[self.spec.dtype]
        stored = stored_dtype(self._entry, self._role)
        first = begin // dtype.itemsize
        target = torch.frombuffer(into, dtype=dtype)
        if stored is dtype:
            self._checkpoint.read_into(target, self._entry, self._role, first)
            return
        read = torch.empty(min(_PIECE, target.numel()), dtype=stored)
        for start in range(0, target.numel(), _PIECE):
            piece = target[start : start + _PIECE]
            self._checkpoint.read_into(
                read[: piece.numel()], self._entry, self._role, first + start
            )
            round_into(piece, read[: piece.numel()])


def export(
    checkpoint: Checkpoint,
    out: Path,
    *,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    file_bytes: int | None = None,
    excludes_frozen: bool = False,
) -> Exported:
    """Write a folder that `from_pretrained` loads.

    Args:
        checkpoint: From where; every byte that is used is verified first.
        out: A folder that is not there yet, or is empty.
        dtype: A key of `EXPORT_DTYPES` for weights in floating point; None keeps the dtype each
            was trained in. Buffers keep theirs.
        tokenizer: A tokenizer's folder; None takes the one that `forebay train` kept in the run of
            the checkpoint, if it is of one.
        file_bytes: Most bytes of a file, or one tensor; None takes what transformers does.
        excludes_frozen: Leave frozen parameters out.

    Raises:
        ConfigError: The folder is there already, or there is no tokenizer where one is named.
        CheckpointError: The checkpoint is damaged, or the folder cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out} is there already and not an empty folder", hint="name a new folder"
        )
    checkpoint.verify({Role.MASTER, Role.VALUE})
    manifest = checkpoint.manifest
    adapter = _only_adapter(manifest)
    sources: list[Source] = [
        _Weight(checkpoint, entry, _spec(entry, dtype=dtype, adapter=adapter))
        for entry in manifest.parameters
        if entry.kind is Kind.TRAINED
        or (adapter is None and not (excludes_frozen and entry.kind is Kind.FROZEN))
    ]
    plan = plan_files(sources, file_bytes=file_bytes or _FILE_BYTES)
    partial = out.parent / f".{out.name}.forebay-partial"
    disk = RealDisk()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        disk.remove_tree(partial)
        disk.make_folder(partial)
        has_config = _write(partial, plan, manifest, dtype=dtype, adapter=adapter)
        links = Links.REFUSE if tokenizer is None else Links.FOLLOW
        tokenizer = tokenizer or find_tokenizer(checkpoint.folder)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, partial, disk=disk, links=links)
        disk.sync_folder(partial)
        disk.rename(partial, out)
        disk.sync_folder(out.parent)
    except OSError as error:
        disk.remove_tree(partial)
        reason, hint = reason_of(error)
        raise CheckpointError(f"cannot write {out}: {reason}", hint=hint) from error
    except ForebayError:
        disk.remove_tree(partial)
        raise
    return Exported(
        path=str(out),
        files=len(plan),
        tensors=len(sources),
        nbytes=sum(source.spec.nbytes for source in sources),
        is_adapter=adapter is not None,
        has_config=has_config,
        has_tokenizer=tokenizer is not None,
    )


def _only_adapter(manifest: Manifest) -> str | None:
    """The name of a PEFT adapter, if there is one and nothing else is trained."""
    adapters = manifest.model.get("adapters")
    if not isinstance(adapters, dict) or len(adapters) != 1:
        return None
    name = str(next(iter(adapters)))
    trained = [entry for entry in manifest.parameters if entry.kind is Kind.TRAINED]
    marked = all(f".{name}." in f"{entry.names[0]}." for entry in trained)
    return name if trained and marked else None


def _spec(entry: ParameterEntry, *, dtype: str | None, adapter: str | None) -> TensorSpec:
    changes = dtype is not None and entry.kind is not Kind.BUFFER and entry.dtype in _KEPT
    name = entry.names[0]
    if adapter is not None:
        name = f"{name}.".replace(f".{adapter}.", ".")[:-1]
    return TensorSpec(
        key=name,
        dtype=EXPORT_DTYPES[dtype] if changes and dtype is not None else entry.dtype,
        shape=entry.shape,
    )


def _write(
    folder: Path,
    plan: list[list[Source]],
    manifest: Manifest,
    *,
    dtype: str | None,
    adapter: str | None,
) -> bool:
    stem = "model" if adapter is None else "adapter_model"
    total = len(plan)
    named = [
        (
            f"{stem}.safetensors"
            if total == 1
            else f"{stem}-{index:05d}-of-{total:05d}.safetensors",
            members,
        )
        for index, members in enumerate(plan, start=1)
    ]
    writer = TensorWriter(
        folder,
        disk=RealDisk(),
        staging=Staging(_PIECES * PIECE_BYTES, block_bytes=PIECE_BYTES),
        metadata={"format": "pt"},
    )
    written = writer.write(named)
    if total > 1:
        index = {
            "metadata": {"total_size": sum(s.spec.nbytes for members in plan for s in members)},
            "weight_map": {key: file for key, (file, _) in sorted(written.places.items())},
        }
        _write_json(folder / f"{stem}.safetensors.index.json", index)
    if adapter is not None:
        _write_json(folder / "adapter_config.json", manifest.model["adapters"][adapter])
        return True
    config = manifest.model.get("config")
    if not isinstance(config, dict):
        return False
    _write_json(folder / "config.json", _config(config, manifest, dtype=dtype))
    generation = manifest.model.get("generation_config")
    if isinstance(generation, dict):
        _write_json(folder / "generation_config.json", generation)
    return True


def _config(config: dict[str, Any], manifest: Manifest, *, dtype: str | None) -> dict[str, Any]:
    trained = [entry.dtype for entry in manifest.parameters if entry.kind is Kind.TRAINED]
    written = EXPORT_DTYPES[dtype] if dtype else max(set(trained), key=trained.count, default="F32")
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    classes = config.get("architectures") or [manifest.model.get("class")]
    return {**config, "architectures": classes, name: _TORCH_NAMES.get(written)}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    disk = RealDisk()
    file = disk.create(path)
    try:
        text = json.dumps(value, indent=2, sort_keys=True) + "\n"
        disk.write(file, memoryview(text.encode()), at=0)
        disk.sync(file)
    finally:
        disk.close(file)
