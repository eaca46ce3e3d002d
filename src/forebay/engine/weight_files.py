"""Weights in safetensors files, as tensors that are read where and when they are used.

What a pickle holds is never read: to open one is to run what it says.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError, safe_open

from forebay.errors import CheckpointError
from forebay.model.unbuilt import UnbuiltWeight

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["INDEX", "read_weights"]

_WHOLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_HINT: Final = "name the folder that save_pretrained or save_16bit_model wrote"


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFile:
    """A `WeightRecipe`: one tensor of a file.

    Attributes:
        file: The file.
        name: The tensor's name in it.
    """

    file: Path
    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        """See `WeightRecipe`: the file's pages, of which those come that are looked at."""
        with _opened(self.file) as opened:
            value: torch.Tensor = opened.get_tensor(self.name)
        return value

    def fingerprint(self) -> str:
        """See `WeightRecipe`: how it begins and ends, since all of it may be many gigabytes."""
        words = self.make().reshape(-1).view(torch.uint8)
        total = hashlib.sha256(f"{self.name} {self.size} {self.dtype}".encode())
        for edge in (words[: mmap.PAGESIZE], words[-mmap.PAGESIZE :]):
            total.update(edge.numpy().tobytes())
        return total.hexdigest()[:16]


def read_weights(path: str | Path) -> dict[str, UnbuiltWeight]:
    """The weights of a folder of safetensors files, or of one, by name; none is read yet.

    Args:
        path: The folder: of what its index names where there is one, else of all such files.

    Raises:
        CheckpointError: There are none, one is unreadable, or the index names what is elsewhere.
    """
    return {name: weight for file in _files(Path(path)) for name, weight in _weights_in(file)}


def _files(path: Path) -> list[Path]:
    """As transformers looks for them."""
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    if (path / _WHOLE).is_file():
        return [path / _WHOLE]
    if (path / INDEX).is_file():
        return _files_of_index(path / INDEX)
    found = sorted(path.glob("*.safetensors"))
    if found:
        return found
    pickles = [path] if path.is_file() else sorted([*path.glob("*.bin"), *path.glob("*.pt")])
    if pickles:
        raise CheckpointError(
            f"{path} holds no safetensors files, and forebay reads no pickles ({pickles[0].name}): "
            "to open one is to run what it says",
            hint="where you trust it: from_pretrained(folder).save_pretrained(other_folder) with "
            "transformers writes safetensors",
        )
    raise CheckpointError(f"{path} holds no safetensors files", hint=_HINT)


def _files_of_index(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        strange = sorted(str(name) for name in names if Path(name).name != name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f'{index} is no index of weights: no JSON object with a "weight_map"', hint=_HINT
        ) from error
    if strange:
        raise CheckpointError(
            f"{index} names the file {strange[0]!r}, which is not in its own folder",
            hint="an index names files beside it; put them there",
        )
    missing = sorted(name for name in names if not (index.parent / name).is_file())
    if missing:
        raise CheckpointError(
            f"{len(missing)} of the {len(names)} files that {index} names are missing, the first "
            f"is {missing[0]}",
            hint="fetch the whole folder",
        )
    return [index.parent / name for name in sorted(names)]


def _weights_in(file: Path) -> Iterator[tuple[str, UnbuiltWeight]]:
    with _opened(file) as opened:
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            tensor = opened.get_tensor(name)  # no page of it comes before it is looked at
            recipe = _InFile(
                file=file,
                name=name,
                size=tuple(tensor.shape),
                stride=tensor.stride(),
                dtype=tensor.dtype,
            )
            yield name, UnbuiltWeight(recipe, dtype=tensor.dtype)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read the weights in {file}: {error}", hint="fetch the file again"
        ) from error
