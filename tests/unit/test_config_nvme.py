"""State in files, from the configuration to the engine's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from config_cases import merged, refusal, resolved
from forebay.compat.files import nvme_options
from forebay.config.nvme_spec import AioSpec, NvmeSpec

_OFFLOAD: dict[str, Any] = {"device": "nvme", "nvme_path": "/data"}
_NVME: dict[str, Any] = {"zero_optimization": {"stage": 2, "offload_optimizer": _OFFLOAD}}


def _with(**offload: Any) -> dict[str, Any]:
    return merged(_NVME, {"zero_optimization": {"offload_optimizer": offload}})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_keeps_state_in_files(stage: int) -> None:
    """Not silently in memory, as stages 1 and 2 do elsewhere."""
    config = resolved(merged(_NVME, {"zero_optimization": {"stage": stage}}))
    assert config.zero.optimizer_tier == "nvme"
    assert config.zero.nvme == NvmeSpec(paths=("/data",))


def test_every_key_reaches_the_engine() -> None:
    raw = _with(
        nvme_path=["/a", "/b"],
        buffer_count=7,
        buffer_size=2e6,
        pipeline_read=False,
        pipeline_write=False,
    )
    raw["aio"] = {
        "block_size": 8192,
        "queue_depth": 32,
        "thread_count": 4,
        "single_submit": True,
        "overlap_events": False,
    }
    raw["forebay"] = {"nvme_budget": "2GiB", "host_budget": "1GiB"}
    config = resolved(raw)
    assert config.zero.nvme == NvmeSpec(
        paths=("/a", "/b"),
        buffer_count=7,
        buffer_elements=2_000_000,
        pipeline_read=False,
        pipeline_write=False,
        aio=AioSpec(
            block_bytes=8192,
            queue_depth=32,
            parallelism=4,
            single_submit=True,
            overlap_events=False,
        ),
    )
    options = nvme_options(config)
    assert options is not None
    assert (options.paths, options.budget) == ((Path("/a"), Path("/b")), 2 << 30)
    assert (options.buffer_count, options.buffer_elements) == (7, 2_000_000)
    assert (options.reads_ahead, options.writes_behind) == (False, False)
    access = options.access
    assert (access.block_bytes, access.depth) == (8192, 128)
    assert (access.single_submit, access.overlap_events) == (True, False)
    assert resolved(config.as_dict()) == config


def test_without_files_the_keys_change_nothing_and_say_so() -> None:
    raw = _with(device="cpu", buffer_count=9)
    raw["aio"] = {"block_size": 8192}
    config = resolved(raw)
    assert config.zero.nvme is None
    notes = {row.path: row.note for row in config.describe()}
    for path in ("zero_optimization.offload_optimizer.buffer_count", "aio.block_size"):
        assert notes[path] == "changes nothing: it acts with device nvme only"


def test_direct_storage_changes_nothing_and_says_so() -> None:
    config = resolved(merged(_NVME, {"aio": {"use_gds": True}}))
    notes = {row.path: row.note for row in config.describe()}
    assert notes["aio.use_gds"] == "changes nothing: state in files is updated on the host"


@pytest.mark.parametrize(("asked", "refused"), [(None, False), (True, False), (False, True)])
def test_direct_storage_is_used_where_it_is_unless_it_is_not_wanted(
    asked: bool | None, refused: bool
) -> None:
    both = {"stage": 3, "offload_param": {"device": "nvme"}}
    raw = merged(_NVME, {"zero_optimization": both, "aio": {"use_gds": asked}})
    options = nvme_options(resolved(raw))
    assert options is not None
    assert (options.direct is not None) == refused
    if options.direct is not None:
        assert (options.direct.library, options.direct.reason) == (None, "aio.use_gds is false")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero_optimization": {"offload_optimizer": {"nvme_path": None}}}, "needs zero_optim"),
        ({"zero_optimization": {"offload_optimizer": {"nvme_path": []}}}, "must be text, or a li"),
        ({"aio": {"block_size": 5000}}, "must be an integer >= 4096 and a multiple of it"),
        ({"aio": {"block_size": 512}}, "must be an integer >= 4096 and a multiple of it"),
        ({"aio": {"queue_depth": 0}}, "must be an integer from 1 to 128"),
        ({"aio": {"queue_dept": 8}}, "did you mean aio.queue_depth"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    assert message in str(refusal(_NVME, change))
