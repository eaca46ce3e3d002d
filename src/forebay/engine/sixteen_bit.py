"""The module's weights alone, in 16 bits, as one safetensors file, streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.header import TensorSpec, dtype_name
from forebay.checkpoint.manifest import BLOCK_BYTES, Kind
from forebay.checkpoint.sources import ReadSource, RoundedSource, TensorSource
from forebay.checkpoint.writer import PIECE_BYTES, Staging, TensorWriter
from forebay.comm.together import Together
from forebay.engine.gathered_weights import GatheredWeight, Gathers
from forebay.engine.snapshot import untrained_tensors
from forebay.errors import CheckpointError
from forebay.hardware.reason import reason_of

if TYPE_CHECKING:
    from pathlib import Path

    from forebay.checkpoint.sources import Source
    from forebay.engine.engine import Engine
    from forebay.engine.record import ParamRecord

__all__ = ["save_sixteen_bit"]

_PIECES = 4


def save_sixteen_bit(engine: Engine, path: Path, *, excludes_frozen: bool) -> None:
    """Write every weight once, under its first name; float32 becomes bfloat16.

    Rank 0 writes. Where weights are sharded every rank brings it its slices, piece by piece.

    Args:
        engine: Whose module is saved; every rank calls this.
        path: The file; an old one is replaced once the new one is whole.
        excludes_frozen: Whether frozen parameters are left out.

    Raises:
        CheckpointError: The name is of another format, or the file cannot be written.
        RankError: A rank is gone, or has not come to save too.
    """
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path.name} is no safetensors file, and forebay writes no pickles",
            hint="save_16bit_model(save_dir, 'model.safetensors')",
        )
    together = Together.of(engine.options.group, "weights", otherwise=CheckpointError)
    together.arrive(what=f"saving {path}")
    engine.settle_masters()
    gathers = Gathers(engine)
    sources = [_weight(record, gathers) for record in engine.collector.records]
    sources += [
        _source(other.names[0], other.tensor.detach().contiguous())
        if other.slices is None
        else _weight(other.slices, gathers)
        for other in untrained_tensors(engine)
        if other.kind is not Kind.FROZEN or not excludes_frozen
    ]

    def _work() -> None:
        try:
            if together.is_first:
                _write(path, sources)
        finally:  # also what rank 0 could not write: the others are in the middle of it
            gathers.follow()

    together.run(_work, what=f"saving {path}")


def _write(path: Path, sources: list[Source]) -> None:
    disk, partial = RealDisk(), f".{path.name}.forebay-partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.remove_tree(path.parent / partial)
        is_gathered = any(isinstance(source, GatheredWeight) for source in sources)
        writer = TensorWriter(
            path.parent,
            disk=disk,
            staging=_staging(is_gathered),
            on_read=_ignore if is_gathered else None,  # so that pieces are filled in order
            metadata={"format": "pt"},
        )
        writer.write([(partial, sources)])
        disk.rename(path.parent / partial, path)
        disk.sync_folder(path.parent)
    except OSError as error:
        disk.remove_tree(path.parent / partial)
        reason, hint = reason_of(error)
        raise CheckpointError(f"cannot save {path}: {reason}", hint=hint) from error


def _staging(is_gathered: bool) -> Staging:  # noqa: FBT001
    if is_gathered:
        return Staging(_PIECES * BLOCK_BYTES)
    return Staging(_PIECES * PIECE_BYTES, block_bytes=PIECE_BYTES)


def _ignore(source: Source) -> None:
    del source


def _weight(record: ParamRecord, gathers: Gathers) -> Source:
    """A weight where it lives; from files or ranks it is read piece by piece."""
    part, slot = record.part, record.slot
    if not part.is_sharded and part.weight_files is None:
        return _source(record.label, part.stored(slot))
    dtype = torch.bfloat16 if part.dtype is torch.float32 else part.dtype
    name = dtype_name(dtype, what=record.label)
    spec = TensorSpec(key=record.label, dtype=name, shape=slot.shape)
    if part.is_sharded:
        return gathers.source(record, spec)
    return ReadSource(spec, part.read_own_weights, first=slot.offset)


def _source(name: str, value: torch.Tensor) -> Source:
    if value.dtype is torch.float32:
        return RoundedSource(
            TensorSpec(key=name, dtype="BF16", shape=tuple(value.shape)), value, torch.bfloat16
        )
    spec = TensorSpec(key=name, dtype=dtype_name(value.dtype, what=name), shape=tuple(value.shape))
    return TensorSource(spec, value)
