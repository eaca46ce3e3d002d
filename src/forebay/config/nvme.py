"""From the keys of `offload_optimizer` and `aio` to an `NvmeSpec`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from forebay.config.nvme_spec import AioSpec, NvmeSpec

if TYPE_CHECKING:
    from forebay.config.lookup import Lookup

__all__ = ["resolve_nvme"]

_OFFLOAD: Final = "zero_optimization.offload_optimizer"
_BUFFERS: Final = ("buffer_count", "buffer_size", "pipeline_read", "pipeline_write")
_AIO: Final = (
    "block_size",
    "queue_depth",
    "intra_op_parallelism",
    "single_submit",
    "overlap_events",
)


def resolve_nvme(lookup: Lookup, *, device: str) -> NvmeSpec | None:
    """What the configuration says of files; None where no state is in any.

    Args:
        lookup: The configuration.
        device: Where the optimizer state lives.
    """
    keys = [f"{_OFFLOAD}.{name}" for name in ("nvme_path", *_BUFFERS)]
    keys += [f"aio.{name}" for name in _AIO]
    keys.append("forebay.nvme_budget")
    if device != "nvme":
        lookup.moot(keys, note="changes nothing: it acts with device nvme only")
        return None
    paths = lookup.take(f"{_OFFLOAD}.nvme_path")
    count, elements, reads, writes = (lookup.take(f"{_OFFLOAD}.{name}") for name in _BUFFERS)
    if elements is None:
        lookup.annotate(f"{_OFFLOAD}.buffer_size", "as the host budget allows, at most 4 Mi")
    block, depth, parallelism, single, overlap = (lookup.take(f"aio.{name}") for name in _AIO)
    return NvmeSpec(
        paths=(paths,) if isinstance(paths, str) else tuple(paths),
        buffer_count=count,
        buffer_elements=elements,
        pipeline_read=reads,
        pipeline_write=writes,
        aio=AioSpec(
            block_bytes=block,
            queue_depth=depth,
            parallelism=parallelism,
            single_submit=single,
            overlap_events=overlap,
        ),
    )
