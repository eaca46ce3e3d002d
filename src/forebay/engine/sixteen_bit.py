"""The module's weights alone, in 16 bits, as one safetensors file, streamed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.header import TensorSpec, dtype_name
from forebay.checkpoint.manifest import Kind
from forebay.checkpoint.sources import ReadSource, RoundedSource, TensorSource
from forebay.checkpoint.writer import PIECE_BYTES, Staging, TensorWriter
from forebay.engine.snapshot import untrained_tensors
from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from forebay.checkpoint.sources import Source
    from forebay.engine.engine import Engine
    from forebay.engine.record import ParamRecord

__all__ = ["save_sixteen_bit"]

_PIECES = 4


def save_sixteen_bit(engine: Engine, path: Path, *, excludes_frozen: bool) -> None:
    """Write every weight once, under its first name; float32 becomes bfloat16.

    Args:
        engine: Whose module is saved; call it after the barrier.
        path: The file; an old one is replaced once the new one is whole.
        excludes_frozen: Whether frozen parameters are left out.

    Raises:
        CheckpointError: The name is of another format, or the file cannot be written.
    """
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path.name} is no safetensors file, and forebay writes no pickles",
            hint="save_16bit_model(save_dir, 'model.safetensors')",
        )
    sources = [_weight(record) for record in engine.collector.records]
    named = [
        (other.names[0], other.tensor.detach().contiguous())
        for other in untrained_tensors(engine.module, engine.collector.records)
        if other.kind is not Kind.FROZEN or not excludes_frozen
    ]
    sources += [_source(name, value) for name, value in named]
    disk, partial = RealDisk(), f".{path.name}.forebay-partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.remove_tree(path.parent / partial)
        writer = TensorWriter(
            path.parent,
            disk=disk,
            staging=Staging(_PIECES * PIECE_BYTES, block_bytes=PIECE_BYTES),
            metadata={"format": "pt"},
        )
        writer.write([(partial, sources)])
        disk.rename(path.parent / partial, path)
        disk.sync_folder(path.parent)
    except OSError as error:
        disk.remove_tree(path.parent / partial)
        raise CheckpointError(f"cannot save {path}: {error.strerror or os.strerror(5)}") from error


def _weight(record: ParamRecord) -> Source:
    """A trained weight where it lives; from files it is read piece by piece."""
    part, slot = record.part, record.slot
    if part.weight_files is None:
        return _source(record.label, part.stored(slot))
    dtype = torch.bfloat16 if part.dtype is torch.float32 else part.dtype
    name = dtype_name(dtype, what=record.label)
    spec = TensorSpec(key=record.label, dtype=name, shape=tuple(slot.shape))
    return ReadSource(spec, part.read_own_weights, first=slot.offset)


def _source(name: str, value: torch.Tensor) -> Source:
    if value.dtype is torch.float32:
        return RoundedSource(
            TensorSpec(key=name, dtype="BF16", shape=tuple(value.shape)), value, torch.bfloat16
        )
    spec = TensorSpec(key=name, dtype=dtype_name(value.dtype, what=name), shape=tuple(value.shape))
    return TensorSource(spec, value)
