"""What scripts use of weights in safetensors files: models that have none before forebay's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from forebay.engine.weight_files import read_weights
from forebay.errors import CheckpointError
from forebay.model.inspect import names_and_owners
from forebay.model.unbuilt import UnbuiltWeight

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["file_weights", "weights_from"]


def file_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """The weights in safetensors files as a state dict that takes no memory.

    It is for loaders that put the tensors of a state dict into a model themselves:
    `LlamaForCausalLM.from_pretrained(None, config=config, state_dict=file_weights(folder))`, or
    `model.load_state_dict(file_weights(folder), assign=True)`. `forebay.initialize` and
    `forebay.offload` then read each parameter straight into its place, and each rank its slice.
    Before that a parameter has shape and dtype and no elements, as inside `Init`.

    Args:
        path: A folder of safetensors files, or one file.

    Returns:
        Tensors by their names in the files; they may be cast, cut and joined.

    Raises:
        CheckpointError: There are no such files, or one is unreadable.
    """
    return dict(read_weights(path))


def weights_from(model: nn.Module, path: str | Path) -> nn.Module:
    """Say where the values of a model that was built on the meta device come from.

    When forebay takes the model over, each parameter is read straight into the memory where it is
    to live, so the model never exists anywhere else.

    Args:
        model: Built inside `with torch.device("meta")`, its buffers with values.
        path: A folder of safetensors files, or one file.

    Returns:
        The model. Its parameters are the same objects, in the dtypes that they had.

    Raises:
        CheckpointError: There are no such files, or they are another model's; nothing was changed.
    """
    weights = read_weights(path)
    params = [param for param in model.parameters() if param.is_meta]
    names, _ = names_and_owners(model)
    found = [_weight_of(param, names[id(param)], weights, path=path) for param in params]
    for param, weight in zip(params, found, strict=True):
        unbuilt = nn.Parameter(weight.to(param.dtype), requires_grad=param.requires_grad)
        torch.utils.swap_tensors(param, unbuilt)
    return model


def _weight_of(
    param: nn.Parameter, names: list[str], weights: dict[str, UnbuiltWeight], *, path: str | Path
) -> UnbuiltWeight:
    name = next((name for name in names if name in weights), None)
    if name is None:
        raise CheckpointError(
            f"{path} has no weights named {names[0]}",
            hint="forebay.zero.file_weights(path) is a state dict of what it has",
        )
    if weights[name].shape != param.shape:
        raise CheckpointError(
            f"{name} has the shape {list(weights[name].shape)} in {path} and "
            f"{list(param.shape)} in the model"
        )
    return weights[name]
