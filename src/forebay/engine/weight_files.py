"""Values of parameters that have no memory yet: made or read from files, one at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import safe_open

from forebay.errors import CheckpointError
from forebay.model.unbuilt import UnbuiltWeight

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ParameterSource", "WeightFiles", "has_memory", "value_of"]


class ParameterSource(Protocol):
    """Gives each parameter its value, once, when its memory is there."""

    def read(self, names: Sequence[str], like: torch.Tensor) -> torch.Tensor:
        """The value of the parameter that has these names.

        Args:
            names: All of its names in the model.
            like: The parameter on the meta device, for shape and dtype.

        Raises:
            CheckpointError: There is none, or it has another shape.
        """
        ...


def has_memory(param: torch.Tensor) -> bool:
    """Whether a parameter has its elements already."""
    return not param.is_meta and not isinstance(param, UnbuiltWeight)


def value_of(
    param: torch.Tensor, names: Sequence[str], source: ParameterSource | None
) -> torch.Tensor:
    """A parameter's elements, wherever they come from.

    Args:
        param: The parameter.
        names: All of its names in the model.
        source: Has those of parameters on the meta device.
    """
    if isinstance(param, UnbuiltWeight):
        return param.build()
    if not param.is_meta:
        return param.data
    assert source is not None
    return source.read(names, param)


class WeightFiles:
    """The safetensors files of a folder (or one file), under the names of a state dict.

    Args:
        path: The folder, or the file.

    Raises:
        CheckpointError: There are no such files.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file_of: dict[str, Path] = {}
        index = self._path / "model.safetensors.index.json"
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._file_of = {name: self._path / file for name, file in names.items()}
            return
        files = [self._path] if self._path.is_file() else sorted(self._path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"{self._path} holds no safetensors files",
                hint="name the folder that save_pretrained or save_16bit_model wrote",
            )
        for file in files:
            with safe_open(file, framework="pt") as opened:
                self._file_of.update(dict.fromkeys(opened.keys(), file))

    def read(self, names: Sequence[str], like: torch.Tensor) -> torch.Tensor:
        """See `ParameterSource`."""
        name = next((name for name in names if name in self._file_of), None)
        if name is None:
            raise CheckpointError(f"{self._path} has no weights named {names[0]}")
        with safe_open(self._file_of[name], framework="pt") as opened:
            value: torch.Tensor = opened.get_tensor(name)
        if value.shape != like.shape:
            raise CheckpointError(
                f"{name} has the shape {list(value.shape)} in {self._path} and "
                f"{list(like.shape)} in the model"
            )
        return value
