"""Which ranks share a copy of the state, and how gradients travel between them: as configured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from forebay.comm.exchange import Exchange, Reduction
from forebay.compat.inputs import DTYPES
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.comm.torch_group import TorchGroup
    from forebay.config.resolved import ResolvedConfig

__all__ = ["check_mesh", "exchange_of", "join_copies"]


def check_mesh(mesh: Any, *, sharers: int | None) -> None:
    """Refuse what is no mesh, or contradicts the configuration; also where a process is alone.

    Raises:
        ConfigError: Both say which ranks share a copy of the state, or the mesh is none.
    """
    if mesh is None:
        return
    if sharers is not None:
        raise ConfigError(
            "initialize(mesh_param=...) and zero_optimization.mics_shard_size both say which ranks "
            "share a copy of the state",
            hint="leave one of them out",
        )
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"initialize(mesh_param=...) is of type {type(mesh).__name__}, not a DeviceMesh",
            hint="leave it out, or pass "
            "torch.distributed.device_mesh.init_device_mesh(kind, (copies, sharers))",
        )


def join_copies(group: TorchGroup, *, mesh: DeviceMesh | None, sharers: int | None) -> None:
    """Let groups of ranks hold a copy of the state each, as a mesh or the configuration says.

    Args:
        group: All ranks.
        mesh: Checked by `check_mesh`.
        sharers: How many ranks share a copy; None for all.
    """
    if mesh is not None:
        group.follow(mesh)
    elif sharers is not None and sharers < group.size:
        group.split(sharers)


def exchange_of(config: ResolvedConfig) -> Exchange:
    """How a configuration lets gradients travel."""
    spec = config.exchange
    dtype = None if spec.dtype is None else DTYPES[spec.dtype]
    return Exchange(reduction=Reduction(spec.reduction), dtype=dtype)
