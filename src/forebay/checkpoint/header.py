"""The head of a safetensors file: which tensors it holds, and where their bytes are.

Written by hand, since the library's writer wants whole tensors; read by hand, since every number
in it is a stranger's. A file is: the header's length (8 bytes, little endian), the header (JSON),
then the tensors' bytes without gaps. https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from forebay.checkpoint.values import parse_json
from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "DTYPES",
    "MAX_HEADER_BYTES",
    "TensorSpec",
    "build_header",
    "dtype_name",
    "is_shape",
    "parse_header",
]

# The library's own limit.
MAX_HEADER_BYTES: Final = 100_000_000
_MAX_ELEMENTS: Final = 1 << 48
_MAX_DIMS: Final = 64

DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a file.

    Attributes:
        key: Its name in the file.
        dtype: A key of `DTYPES`.
        shape: Its shape.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return self.elements * DTYPES[self.dtype].itemsize


def dtype_name(dtype: torch.dtype, *, what: str) -> str:
    """The format's name of a torch dtype.

    Raises:
        CheckpointError: It has none.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise CheckpointError(
            f"{what} has dtype {dtype}, which safetensors does not hold"
        ) from None


def build_header(
    tensors: Sequence[TensorSpec],
    *,
    metadata: dict[str, str] | None = None,
    data_alignment: int = 8,
) -> tuple[bytes, list[int]]:
    """The head of a file with these tensors in this order.

    Args:
        tensors: What follows.
        metadata: The file's own.
        data_alignment: The first tensor begins at a multiple of so many bytes, itself one of 8.

    Returns:
        The bytes before the data, and where in the file each tensor begins.
    """
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    begins, position = [], 0
    for tensor in tensors:
        assert tensor.key not in entries, tensor.key
        begins.append(position)
        end = position + tensor.nbytes
        entries[tensor.key] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # With spaces, as the library does it.
    text += b" " * (-(8 + len(text)) % data_alignment)
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + begin for begin in begins]


def parse_header(
    text: bytes | bytearray, *, data_bytes: int, what: str
) -> dict[str, tuple[TensorSpec, int, int]]:
    """Read a header; every number is checked against the file.

    Args:
        text: The JSON.
        data_bytes: How many bytes follow it.
        what: The file, for messages.

    Returns:
        By key: the tensor, and where its bytes begin and end after the header.

    Raises:
        CheckpointError: Anything is not as the format says.
    """
    found: dict[str, tuple[TensorSpec, int, int]] = {}
    for key, entry in parse_json(text, what=f"the header of {what}").items():
        if key != "__metadata__":
            found[key] = _tensor(key, entry, what=what)
    position = 0
    for spec, begin, end in sorted(found.values(), key=lambda item: item[1:]):
        if begin != position:
            raise CheckpointError(
                f"{what}: tensor {_short(spec.key)} begins at byte {begin}, and the one before "
                f"it ends at {position}"
            )
        position = end
    if position != data_bytes:
        raise CheckpointError(
            f"{what}: its tensors take {position} bytes, and the file holds {data_bytes}"
        )
    return found


def _tensor(key: str, entry: Any, *, what: str) -> tuple[TensorSpec, int, int]:
    where = f"{what}: tensor {_short(key)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} has no dtype, shape and data_offsets, or more than those")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where} has the unknown dtype {_short(str(dtype))}")
    if not is_shape(shape):
        raise CheckpointError(f"{where} has an impossible shape")
    spec = TensorSpec(key=key, dtype=dtype, shape=tuple(shape))
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != spec.nbytes:
        raise CheckpointError(f"{where} has data_offsets that are not its {spec.nbytes} bytes")
    return spec, offsets[0], offsets[1]


def is_shape(values: Any) -> bool:
    """Whether a list of numbers is a shape that a tensor can have."""
    # The number of dims first: a product of thousands of large numbers takes minutes.
    return _are_sizes(values) and len(values) <= _MAX_DIMS and math.prod(values) <= _MAX_ELEMENTS


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= _MAX_ELEMENTS * 16 for value in values
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
