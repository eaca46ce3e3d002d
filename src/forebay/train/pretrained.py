"""A model of a local Hugging Face folder, whose weights stay in its files until they have a place.

transformers says which tensor of the files goes where, as in any `from_pretrained`; what it is
given are tensors that are read later (`forebay.zero.file_weights`). So no process holds the model
whole, and ranks that keep slices read slices.
"""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from forebay.compat.file_weights import file_weights
from forebay.errors import CheckpointError, ConfigError, ForebayWarning
from forebay.model.unbuilt import UnbuiltWeight

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["load_pretrained"]

_ADAPTER: Final = "adapter_config.json"


def load_pretrained(folder: Path, *, config: Any, dtype: torch.dtype) -> nn.Module:
    """The model of a folder, in evaluation mode.

    Args:
        folder: Holds config.json and safetensors files.
        config: Its `PretrainedConfig`.
        dtype: What its weights become.

    Returns:
        The model; its parameters are in the files until `forebay.initialize` or
        `GatheredParameters`. Where transformers computes with weights while it loads, they are in
        memory, and a warning says so.

    Raises:
        ConfigError: Weights are missing, of another shape, unreadable or pickled.
    """
    scratch = f"to start from scratch: --model {folder / 'config.json'}"
    try:
        weights = file_weights(folder)
    except CheckpointError as error:
        hint = scratch if error.hint is None else f"{error.hint}; {scratch}"
        raise ConfigError(
            f"cannot load the model in {folder}: {error.message}", hint=hint
        ) from error
    try:
        model, loading = _from_files(folder, weights, config=config, dtype=dtype)
    except Exception as error:
        # transformers, safetensors and torch each raise their own kind.
        raise ConfigError(
            f"cannot load the model in {folder}: {_first_line(error)}", hint=scratch
        ) from error
    missing = sorted(loading["missing_keys"])
    if missing:
        # transformers would train them from random values, with a warning among many.
        raise ConfigError(
            f"{len(missing)} weights of the {config.model_type} model are not in {folder}, "
            f"the first is {missing[0]}",
            hint="save the whole model again, as the class that config.json names",
        )
    _read_buffers(model)
    loaded: nn.Module = model
    return loaded


def _from_files(
    folder: Path, weights: dict[str, torch.Tensor], *, config: Any, dtype: torch.dtype
) -> tuple[Any, dict[str, Any]]:
    """The model and what transformers tells of loading it."""
    from transformers import AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM
    reason = _computes(folder, config)
    if reason is None:
        try:
            with torch.device("meta"):  # the automatic class wants a folder
                of_folder = type(kind.from_config(config))
            model, loading = of_folder.from_pretrained(
                None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
            )
            _set_generation(model, folder)
        except Exception as error:
            reason = _first_line(error)
        else:
            return model, loading
    # Its own complaint, if it has one, is the one to read.
    found: tuple[Any, dict[str, Any]] = kind.from_pretrained(
        str(folder),
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    warnings.warn(
        f"every rank has the whole model of {folder} in memory until training begins: {reason}",
        ForebayWarning,
        stacklevel=2,
    )
    return found


def _computes(folder: Path, config: Any) -> str | None:
    """Why a folder's weights are not those of the model; None where they are."""
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantized"
    if (folder / _ADAPTER).exists():
        return f"it has an adapter ({_ADAPTER})"
    return None


def _read_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, UnbuiltWeight):
                module._buffers[name] = buffer.build().clone()


def _set_generation(model: Any, folder: Path) -> None:
    """What a folder says of generation, which `from_pretrained` reads with the weights."""
    file = folder / "generation_config.json"
    if model.can_generate() and file.is_file():
        values = json.loads(file.read_text(encoding="utf-8"))
        model.generation_config = type(model.generation_config).from_dict(values)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
