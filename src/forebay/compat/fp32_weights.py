"""Whole fp32 weights from a checkpoint, whatever ranks and stage it was saved by.

One process reads one tensor at a time, straight from the slices in their files; no engine is needed
and no model is held twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.export import export
from forebay.checkpoint.folder import CheckpointFolder
from forebay.checkpoint.locate import locate
from forebay.checkpoint.manifest import Kind, Role
from forebay.checkpoint.reader import Checkpoint
from forebay.compat.flags import check_flags
from forebay.errors import CheckpointError, ConfigError, UnsupportedError
from forebay.units_of_measure import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from torch import nn

    from forebay.checkpoint.manifest import ParameterEntry

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

# 16 MiB of fp32.
_PIECE = 4 << 20


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | PathLike[str],
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Every weight in fp32 on the host, under all of its names; tied ones share their memory.

    Trained weights are the masters, to the bit. Buffers keep their dtype.

    Args:
        checkpoint_dir: Folder of checkpoints, or a run's.
        tag: Which one; None takes what `latest` names.
        exclude_frozen_parameters: Leave frozen parameters out.
        lazy_mode: Refused: a checkpoint is read tensor by tensor by
            `load_state_dict_from_zero_checkpoint` and `convert_zero_checkpoint_to_fp32_state_dict`.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    check_flags(
        "get_fp32_state_dict_from_zero_checkpoint",
        exclude_frozen_parameters=exclude_frozen_parameters,
        lazy_mode=lazy_mode,
    )
    if lazy_mode:
        raise UnsupportedError(
            "get_fp32_state_dict_from_zero_checkpoint(lazy_mode=True) is not supported",
            hint="load_state_dict_from_zero_checkpoint and "
            "convert_zero_checkpoint_to_fp32_state_dict hold one tensor at a time",
        )
    found: dict[str, torch.Tensor] = {}
    with Checkpoint(_find(checkpoint_dir, tag)) as checkpoint:
        checkpoint.verify({Role.MASTER, Role.VALUE})
        for entry in _entries(checkpoint, excludes_frozen=exclude_frozen_parameters):
            value = checkpoint.read(entry, _role(entry), 0, entry.elements).view(entry.shape)
            if entry.kind is not Kind.BUFFER and value.is_floating_point():
                value = value.float()
            found.update(dict.fromkeys(entry.names, value))
    return found


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | PathLike[str],
    output_dir: str | PathLike[str],
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = True,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a folder of safetensors files that `from_pretrained` loads, in fp32.

    Memory is bounded by a few blocks, whatever the model's size.

    Args:
        checkpoint_dir: Folder of checkpoints, or a run's.
        output_dir: A new or empty folder.
        max_shard_size: Most bytes of a file: 5000000000 or "5GB".
        safe_serialization: True; forebay writes no pickles.
        tag: Which one; None takes what `latest` names.
        exclude_frozen_parameters: Leave frozen parameters out.

    Raises:
        CheckpointError: It is missing or damaged, or the folder cannot be written.
        ConfigError: The folder is there already.
        UnsupportedError: Pickles were asked for.
    """
    check_flags(
        "convert_zero_checkpoint_to_fp32_state_dict",
        safe_serialization=safe_serialization,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )
    if not safe_serialization:
        raise UnsupportedError(
            "convert_zero_checkpoint_to_fp32_state_dict(safe_serialization=False) is not "
            "supported: forebay writes no pickles",
            hint="safe_serialization=True writes safetensors",
        )
    size = max_shard_size if isinstance(max_shard_size, int) else parse_bytes(max_shard_size)
    if size < 1:
        raise ConfigError(f"max_shard_size is {max_shard_size}; it must be positive")
    with Checkpoint(_find(checkpoint_dir, tag)) as checkpoint:
        export(
            checkpoint,
            Path(output_dir),
            dtype="fp32",
            file_bytes=size,
            excludes_frozen=exclude_frozen_parameters,
        )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | PathLike[str], tag: str | int | None = None
) -> nn.Module:
    """Load a checkpoint's weights into a model on any device, which becomes fp32.

    Args:
        model: A model of the same kind that no engine trains.
        checkpoint_dir: Folder of checkpoints, or a run's.
        tag: Which one; None takes what `latest` names.

    Returns:
        The model.

    Raises:
        CheckpointError: It is missing, damaged or another model's; nothing was changed.
    """
    with Checkpoint(_find(checkpoint_dir, tag)) as checkpoint:
        checkpoint.verify({Role.MASTER, Role.VALUE})
        entries = [
            (name, entry) for entry in checkpoint.manifest.parameters for name in entry.names
        ]
        here = model.state_dict(keep_vars=True)
        _refuse_other(here, dict(entries), what=str(checkpoint.folder))
        for name, entry in entries:
            target = here[name]
            if entry.kind is not Kind.BUFFER and target.is_floating_point():
                target.data = target.data.float()
            _fill(target, checkpoint, entry)
    return model


def _refuse_other(
    here: dict[str, torch.Tensor], entries: dict[str, ParameterEntry], *, what: str
) -> None:
    different = sorted(here.keys() ^ entries.keys()) or [
        name for name, entry in entries.items() if tuple(here[name].shape) != entry.shape
    ]
    if different:
        raise CheckpointError(
            f"{what} is of another model: {len(different)} tensors differ, the first is "
            f"{different[0]}"
        )


def _fill(target: torch.Tensor, checkpoint: Checkpoint, entry: ParameterEntry) -> None:
    with torch.no_grad():
        if not target.is_contiguous():
            whole = checkpoint.read(entry, _role(entry), 0, entry.elements)
            target.copy_(whole.view(entry.shape))
            return
        flat = target.detach().view(-1)
        for start in range(0, entry.elements, _PIECE):
            end = min(start + _PIECE, entry.elements)
            flat[start:end] = checkpoint.read(entry, _role(entry), start, end)


def _find(checkpoint_dir: str | PathLike[str], tag: Any) -> Path:
    path = Path(checkpoint_dir)
    if tag is None:
        return locate(path)
    found = CheckpointFolder(path, disk=RealDisk()).find(tag)
    assert found is not None  # only `latest` may be missing
    return found


def _role(entry: ParameterEntry) -> Role:
    return Role.MASTER if entry.kind is Kind.TRAINED else Role.VALUE


def _entries(checkpoint: Checkpoint, *, excludes_frozen: bool) -> Iterator[ParameterEntry]:
    for entry in checkpoint.manifest.parameters:
        if entry.kind is not Kind.FROZEN or not excludes_frozen:
            yield entry
