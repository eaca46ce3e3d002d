"""State in files, as the configuration decides it: folders, buffers and the section `aio`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["AioSpec", "NvmeSpec", "WeightFilesSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AioSpec:
    """How files are read and written, in DeepSpeed's words."""

    block_bytes: int = 1 << 20
    queue_depth: int = 8
    parallelism: int = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """The section `aio`."""
        return {
            "block_size": self.block_bytes,
            "queue_depth": self.queue_depth,
            "intra_op_parallelism": self.parallelism,
            "single_submit": self.single_submit,
            "overlap_events": self.overlap_events,
            "use_gds": self.use_gds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFilesSpec:
    """Working weights in files.

    Attributes:
        buffer_count: Pieces of weights that are in host memory at once.
        buffer_elements: Elements of a piece; None lets the planner choose.
        in_memory_elements: Elements that stay in host memory.
    """

    buffer_count: int = 5
    buffer_elements: int | None = None
    in_memory_elements: int = 1_000_000_000

    def as_dict(self) -> dict[str, Any]:
        """What stands in `offload_param`."""
        return {
            "buffer_count": self.buffer_count,
            "buffer_size": self.buffer_elements,
            "max_in_cpu": self.in_memory_elements,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeSpec:
    """Master weights and moments in files.

    Attributes:
        paths: Folders; several are one striped space.
        buffer_count: Pieces of state that are in host memory at once.
        buffer_elements: Elements of a piece; None lets the planner choose.
        pipeline_read: Whether pieces are read while others are updated.
        pipeline_write: Whether pieces are read before the one before them is written.
        aio: How.
        weights: Working weights in files beside them; None where they live elsewhere.
    """

    paths: tuple[str, ...]
    buffer_count: int = 4
    buffer_elements: int | None = None
    pipeline_read: bool = True
    pipeline_write: bool = True
    aio: AioSpec = AioSpec()
    weights: WeightFilesSpec | None = None

    def as_dict(self) -> dict[str, Any]:
        """What stands in `offload_optimizer`."""
        return {
            "nvme_path": list(self.paths),
            "buffer_count": self.buffer_count,
            "buffer_size": self.buffer_elements,
            "pipeline_read": self.pipeline_read,
            "pipeline_write": self.pipeline_write,
        }
