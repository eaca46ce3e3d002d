"""The engine's options for state in files, from a resolved configuration."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.engine.file_space import NvmeOptions, WeightBuffers
from forebay.engine.offload_files import refuse_a_folder_twice
from forebay.errors import ConfigError
from forebay.links.direct_storage import DirectStorage
from forebay.links.host_nvme import FileAccess
from forebay.model.layout import ITEM_BYTES
from forebay.plan.file_places import least_file_bytes
from forebay.tiers.nvme import missing_folder_hint, prove_folder

if TYPE_CHECKING:
    from forebay.config.nvme_spec import WeightFilesSpec
    from forebay.config.resolved import ResolvedConfig

__all__ = ["nvme_options", "prove_folders", "refuse_missing_folders"]


_KEY: Final = "config key zero_optimization.offload_optimizer.nvme_path"
_UNWANTED: Final = DirectStorage(library=None, reason="aio.use_gds is false")


def nvme_options(config: ResolvedConfig) -> NvmeOptions | None:
    """What `offload_optimizer` and `aio` ask for; None where no state is in files."""
    spec = config.zero.nvme
    if spec is None:
        return None
    paths = tuple(Path(path) for path in spec.paths)
    refuse_a_folder_twice(paths, key=_KEY)
    return NvmeOptions(
        paths=paths,
        access=FileAccess(
            block_bytes=spec.aio.block_bytes,
            queue_depth=spec.aio.queue_depth,
            parallelism=spec.aio.parallelism,
            single_submit=spec.aio.single_submit,
            overlap_events=spec.aio.overlap_events,
        ),
        buffer_count=spec.buffer_count,
        buffer_elements=spec.buffer_elements,
        reads_ahead=spec.pipeline_read,
        writes_behind=spec.pipeline_write,
        budget=config.budgets.nvme_bytes,
        weights=_weights(spec.weights),
        direct=_UNWANTED if spec.aio.use_gds is False else None,
    )


def _weights(spec: WeightFilesSpec | None) -> WeightBuffers:
    if spec is None:
        return WeightBuffers()
    return WeightBuffers(
        count=spec.buffer_count,
        elements=spec.buffer_elements,
        in_memory_elements=spec.in_memory_elements,
    )


def refuse_missing_folders(config: ResolvedConfig) -> None:
    """Refuse a configuration whose folders for files are not there, before anything is loaded.

    Raises:
        ConfigError: With the folder; also where two of them are one.
    """
    spec = config.zero.nvme
    paths = () if spec is None else tuple(map(Path, spec.paths))
    refuse_a_folder_twice(paths, key=_KEY)
    for path in paths:
        what = hint = ""
        with contextlib.suppress(OSError):  # where it cannot be looked at, `prove_folders` says why
            if path.is_dir():
                continue
            if path.exists():
                what, hint = "is a file", "name a folder on a local drive"
            else:
                what, hint = "does not exist", missing_folder_hint(path)
        if what:
            raise ConfigError(f"{_KEY} names {path}, which {what}", hint=hint)


def prove_folders(config: ResolvedConfig, *, elements: int, ranks_here: int) -> None:
    """Refuse folders that cannot be written or have no room, before anything is loaded.

    Args:
        config: The resolved configuration.
        elements: Trained elements of the whole model.
        ranks_here: Ranks of this machine, which use the same folders.

    Raises:
        StorageError: With what is known to be needed there; the plan may need more.
    """
    options = nvme_options(config)
    if options is None:
        return
    sharers = config.exchange.sharers or config.batch.world_size
    own = elements if config.zero.stage == 0 else elements // sharers
    budget = config.budgets.host_bytes
    with_weights = config.zero.parameter_tier == "nvme"
    needed = least_file_bytes(
        options.wants,
        elements=own,
        weight_bytes=ITEM_BYTES[config.precision.dtype] if with_weights else 0,
        host_budget=None if budget is None else budget // ranks_here,
    )
    if config.zero.ratio is not None and config.zero.ratio < 1:
        needed = 0  # some state is on the device, by whole units
    for path in options.paths:
        prove_folder(path, nbytes=needed * ranks_here // len(options.paths))
