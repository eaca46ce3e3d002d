"""From the keys of `offload_optimizer`, `offload_param` and `aio` to an `NvmeSpec`."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

from forebay.config.nvme_spec import AioSpec, NvmeSpec, WeightFilesSpec
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.config.lookup import Lookup

__all__ = ["resolve_nvme"]

_OFFLOAD: Final = "zero_optimization.offload_optimizer"
_PARAM: Final = "zero_optimization.offload_param"
_BUFFERS: Final = ("buffer_count", "buffer_size", "pipeline_read", "pipeline_write")
_AIO: Final = (
    "block_size",
    "queue_depth",
    "intra_op_parallelism",
    "single_submit",
    "overlap_events",
    "use_gds",
)


def resolve_nvme(lookup: Lookup, *, device: str, with_weights: bool) -> NvmeSpec | None:
    """What the configuration says of files; None where no state is in any.

    Args:
        lookup: The configuration.
        device: Where the optimizer state lives.
        with_weights: Whether weights are in files too.

    Raises:
        ConfigError: A folder is named twice, or weights are to be in other folders than state.
    """
    keys = [f"{_OFFLOAD}.{name}" for name in ("nvme_path", *_BUFFERS)]
    keys += [f"aio.{name}" for name in _AIO]
    keys.append("forebay.nvme_budget")
    if device != "nvme":
        lookup.moot(keys, note="changes nothing: it acts with device nvme only")
        return None
    paths = _folders(lookup, f"{_OFFLOAD}.nvme_path")
    count, elements, reads, writes = (lookup.take(f"{_OFFLOAD}.{name}") for name in _BUFFERS)
    if elements is None:
        lookup.annotate(f"{_OFFLOAD}.buffer_size", "as host memory allows, at most 4 Mi")
    block, depth, parallelism, single, overlap, gds = (lookup.take(f"aio.{name}") for name in _AIO)
    if not with_weights:
        lookup.annotate("aio.use_gds", "changes nothing: state in files is updated on the host")
    return NvmeSpec(
        paths=paths,
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
            use_gds=gds,
        ),
        weights=_weights(lookup, paths) if with_weights else None,
    )


def _weights(lookup: Lookup, paths: tuple[str, ...]) -> WeightFilesSpec:
    """What `offload_param` says of its buffers."""
    path = f"{_PARAM}.nvme_path"
    own = _folders(lookup, path)
    if own and [_place(one) for one in own] != [_place(one) for one in paths]:
        raise ConfigError(
            f"config key {path} is {_shown(own)}, and {_OFFLOAD}.nvme_path is {_shown(paths)}",
            hint="write the same for both, a list where there are several drives: state and "
            "weights share them",
        )
    if not own:
        lookup.annotate(path, f"as {_OFFLOAD}.nvme_path")
    names = ("buffer_count", "buffer_size", "max_in_cpu")
    count, elements, in_memory = (lookup.take(f"{_PARAM}.{name}") for name in names)
    if elements is None:
        lookup.annotate(f"{_PARAM}.buffer_size", "as host memory allows, at most 4 Mi")
    return WeightFilesSpec(
        buffer_count=count, buffer_elements=elements, in_memory_elements=in_memory
    )


def _folders(lookup: Lookup, path: str) -> tuple[str, ...]:
    """The folders of a key, each once."""
    given = lookup.take(path)
    if given is None:
        return ()
    found = (given,) if isinstance(given, str) else tuple(given)
    for one in found:
        if found.count(one) > 1:
            raise ConfigError(
                f"config key {path} names {one} {found.count(one)} times: a striped set has each "
                "folder once",
                hint=f"write {_shown(tuple(dict.fromkeys(found)))}",
            )
    return found


def _place(folder: str) -> str:
    """The folder that a path names, however it is written."""
    # not resolve(), which asks the file system: it may refuse the name
    return os.path.abspath(folder)  # noqa: PTH100


def _shown(paths: tuple[str, ...]) -> str:
    return json.dumps(paths[0] if len(paths) == 1 else list(paths))
