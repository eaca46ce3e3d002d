"""What can be tried before data and weights are read: folders, their room, files that are named.

The model's outline says how large everything will be. Nothing is kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.checkpoint.locate import locate
from forebay.compat.files import prove_folders
from forebay.compat.progress import events_folder
from forebay.compat.watching import measured_profile

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forebay.config.resolved import ResolvedConfig
    from forebay.train.options import TrainOptions
    from forebay.train.ranks import TrainRanks
    from forebay.train.save import RunFolder

__all__ = ["prove_inputs", "prove_output", "trained_elements"]

# fp32 master and two moments.
_CHECKPOINT_ITEM_BYTES: Final = 12


def prove_inputs(
    options: TrainOptions,
    draft: ResolvedConfig,
    *,
    outline: nn.Module,
    device: torch.device,
    ranks: TrainRanks,
) -> None:
    """Try what the run reads, and the folders for its state.

    Args:
        options: What the run is asked to do.
        draft: Its configuration.
        outline: The model without memory.
        device: Where it computes.
        ranks: This rank and its peers.

    Raises:
        ConfigError: The profile or the checkpoint to go on from is not there.
        CheckpointError: There is no checkpoint in it.
        StorageError: A folder for state cannot be written or has no room.
    """
    measured_profile(draft, device=device)
    prove_folders(draft, elements=trained_elements(outline), ranks_here=ranks.local_size)
    if options.resume not in (None, "auto") and ranks.speaks:
        locate(Path(str(options.resume)))


def prove_output(
    options: TrainOptions, draft: ResolvedConfig, *, folder: RunFolder, outline: nn.Module
) -> None:
    """Try where results go: there is room for them, and scalars can be written.

    Raises:
        ConfigError: With both sizes, or with the folder.
    """
    saves = 0 if options.save_every is None else _CHECKPOINT_ITEM_BYTES * trained_elements(outline)
    folder.require_room(_weight_bytes(outline), checkpoint_bytes=saves)
    if draft.tensorboard is not None and draft.tensorboard.output_path:
        events_folder(draft.tensorboard)


def trained_elements(model: nn.Module) -> int:
    """Elements of all parameters that are trained."""
    return sum(param.numel() for param in model.parameters() if param.requires_grad)


def _weight_bytes(model: nn.Module) -> int:
    return sum(param.numel() * param.element_size() for param in model.parameters())
