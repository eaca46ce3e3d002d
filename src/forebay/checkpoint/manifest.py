"""The manifest: what a checkpoint holds, as frozen values. `manifest_json` writes and reads it.

It knows no tensors' bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from forebay.checkpoint.checksum import Checksum
from forebay.checkpoint.header import TensorSpec

__all__ = [
    "BLOCK_BYTES",
    "EXTRA_ROLES",
    "MANIFEST",
    "OWN_DTYPE",
    "ROLES",
    "FileEntry",
    "Kind",
    "Manifest",
    "ParameterEntry",
    "Role",
    "Slice",
    "tensor_key",
]

MANIFEST: Final = "manifest.json"
# One checksum each: large enough for the disk, small enough that a few fit beside a model.
BLOCK_BYTES: Final = 16 << 20


class Kind(Enum):
    """What a named tensor of the model is."""

    TRAINED = "trained"
    """A parameter with master and moments."""
    FROZEN = "frozen"
    """A parameter that is not trained."""
    BUFFER = "buffer"
    """A persistent buffer."""


class Role(Enum):
    """What bytes of a named tensor are; the first part of their key in a file."""

    MASTER = "master"
    """fp32 master of a trained parameter; its working weight is this, rounded."""
    EXP_AVG = "exp_avg"
    """fp32 first moment."""
    EXP_AVG_SQ = "exp_avg_sq"
    """fp32 second moment."""
    IN_FORCE = "in_force"
    """Working weight of a trained parameter where training computes with an older one than the
    master, rounded; in its own dtype."""
    GATHERED = "gathered"
    """fp32 gradients of several steps of a trained parameter that no update has used yet; NaN in
    columns whose gradients are used in every step."""
    VALUE = "value"
    """A frozen parameter or buffer in its own dtype."""
    RANDOM = "random"
    """State of a random generator."""


ROLES: Final = {
    Kind.TRAINED: (Role.MASTER, Role.EXP_AVG, Role.EXP_AVG_SQ),
    Kind.FROZEN: (Role.VALUE,),
    Kind.BUFFER: (Role.VALUE,),
}


# Those in the dtype that the tensor has in the model; the others are fp32.
OWN_DTYPE: Final = (Role.VALUE, Role.IN_FORCE)
# Those that an entry may have beside them.
EXTRA_ROLES: Final = {
    Kind.TRAINED: (Role.IN_FORCE, Role.GATHERED),
    Kind.FROZEN: (),
    Kind.BUFFER: (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Elements `[start, end)` of a flat tensor, and where they are.

    Attributes:
        start: First element.
        end: One past the last.
        file: Name of the file.
        checksums: One for each `BLOCK_BYTES` of the slice's bytes.
    """

    start: int
    end: int
    file: str
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEntry:
    """A named tensor of the model.

    Attributes:
        names: All its names in the module tree; the first one is part of its keys.
        kind: What it is.
        shape: Its shape.
        dtype: Dtype in the model, a key of `DTYPES`; masters and moments are F32 all the same.
        group: Index of its optimizer group; None if it is not trained.
        step: Its own count of updates.
        slices: Its bytes by role, in order and without gaps.
    """

    names: tuple[str, ...]
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    group: int | None = None
    step: int = 0
    slices: dict[Role, tuple[Slice, ...]] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return TensorSpec(key="", dtype="F32", shape=self.shape).elements

    def spec(self, role: Role, piece: Slice) -> TensorSpec:
        """The tensor that a slice is in its file: flat, unless it is the whole."""
        whole = piece.start == 0 and piece.end == self.elements
        return TensorSpec(
            key=tensor_key(role, self.names[0], None if whole else (piece.start, piece.end)),
            dtype=self.dtype if role in OWN_DTYPE else "F32",
            shape=self.shape if whole else (piece.end - piece.start,),
        )


def tensor_key(role: Role, name: str, span: tuple[int, int] | None = None) -> str:
    """A tensor's name in its file."""
    return f"{role.value}/{name}" + ("" if span is None else f"[{span[0]}:{span[1]}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of tensors.

    Attributes:
        name: Its name, in the checkpoint's folder.
        nbytes: Its size.
        header_checksum: Checksum of everything before its data.
    """

    name: str
    nbytes: int
    header_checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but the tensors' bytes.

    Attributes:
        files: The files of tensors.
        parameters: The model's named tensors.
        groups: The optimizer's groups without their parameters.
        rule: What weight decay means: "decoupled" (AdamW) or "l2" (Adam).
        excludes_frozen: Whether frozen parameters were left out on request.
        counters: global_steps, micro_steps, global_samples, skipped_steps.
        loss_scale: The loss scale's state.
        scheduler: The schedule's state, or None.
        random: States of the random generators; tensors among them are in `random_tensors`.
        random_tensors: Tensors of generators, by name.
        data: Where the data goes on, or None.
        config: The configuration that ran.
        model: What else belongs to the model: its Hugging Face configuration, adapters.
        policy: What the update policy has beside tensors; None where it has nothing.
        client_state: The user's own.
        writer: Which program wrote it.
        checksum: How bytes are summed.
    """

    files: tuple[FileEntry, ...]
    parameters: tuple[ParameterEntry, ...]
    groups: tuple[dict[str, Any], ...] = ()
    rule: str = "decoupled"
    excludes_frozen: bool = False
    counters: dict[str, int] = field(default_factory=dict)
    loss_scale: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] | None = None
    random: dict[str, Any] = field(default_factory=dict)
    random_tensors: dict[str, tuple[TensorSpec, Slice]] = field(default_factory=dict)
    data: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] | None = None
    client_state: dict[str, Any] = field(default_factory=dict)
    writer: str = ""
    checksum: Checksum = Checksum.CRC32C
