"""Which ranks share a copy of the state, and how gradients travel between them: as configured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch.distributed.device_mesh import DeviceMesh

from forebay.comm.exchange import Exchange, Reduction
from forebay.compat.inputs import DTYPES
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.config.resolved import ResolvedConfig

__all__ = ["check_mesh", "copies_of", "exchange_of"]

_MESH_HINT: Final = (
    'init_device_mesh(kind, (copies, sharers), mesh_dim_names=("replicate", "shard"))'
)
_SHOWN: Final = 8


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


def copies_of(
    *, mesh: DeviceMesh | None, sharers: int | None, size: int
) -> tuple[tuple[int, ...], ...]:
    """The ranks that hold each copy of the state, as a mesh or the configuration says.

    Slices and copies are counted in the order of ranks, in whichever order a mesh names them.

    Args:
        mesh: Checked by `check_mesh`.
        sharers: How many ranks share a copy; None for all.
        size: Number of ranks.

    Raises:
        ConfigError: The mesh has more than two axes, or not every rank once, or its ranks cannot
            be put in order.
    """
    if mesh is not None:
        return _of_mesh(mesh, size)
    count = size if sharers is None else min(sharers, size)
    return tuple(tuple(range(first, first + count)) for first in range(0, size, count))


def _of_mesh(mesh: DeviceMesh, size: int) -> tuple[tuple[int, ...], ...]:
    told = sorted(mesh.mesh.flatten().tolist())
    if mesh.ndim > 2 or told != list(range(size)):
        raise ConfigError(
            f"the mesh has {mesh.ndim} axes and the ranks {_listed(told)}; one or two axes and "
            f"each of the {size} ranks once are needed",
            hint=_MESH_HINT,
        )
    rows: list[list[int]] = mesh.mesh.view(-1, mesh.mesh.shape[-1]).tolist()
    copies = tuple(sorted(tuple(sorted(row)) for row in rows))
    # Ranks with the same slice meet in groups of their own, which torch keeps in order too.
    for column in zip(*copies, strict=True):
        if list(column) != sorted(column):
            raise ConfigError(
                f"the mesh lets ranks {_listed(copies[0])} share one copy of the state, and ranks "
                f"{_listed(copies[-1])} another: slices held in the order of ranks would meet as "
                f"{_listed(column)}, which is in no order",
                hint=_MESH_HINT,
            )
    return copies


def _listed(ranks: Sequence[int]) -> str:
    """The first of them, at most."""
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return shown + (", ..." if len(ranks) > _SHOWN else "")


def exchange_of(config: ResolvedConfig) -> Exchange:
    """How a configuration lets gradients travel."""
    spec = config.exchange
    dtype = None if spec.dtype is None else DTYPES[spec.dtype]
    return Exchange(reduction=Reduction(spec.reduction), dtype=dtype)
