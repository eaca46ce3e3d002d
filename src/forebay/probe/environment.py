"""The environment report: what works here, what does not, why, and what to do about it."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import forebay
from forebay import native
from forebay.accelerators.select import accelerator_for, default_device, device_name
from forebay.errors import ForebayError
from forebay.hardware.affinity import Topology
from forebay.hardware.cgroup import cpu_quota
from forebay.hardware.limits import HostLimit, host_ceiling, locked_memory_limit
from forebay.hardware.storage import storage_of
from forebay.links.direct_storage import find_direct_storage
from forebay.probe.system import HUGE_PAGES, huge_pages
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Finding", "State", "report"]


class State(Enum):
    """How a part stands."""

    WORKS = "works"
    LIMITED = "limited"
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        part: What was looked at.
        state: How it stands.
        detail: What was found, and what follows from it.
        remedy: What to do; empty where nothing needs doing.
    """

    part: str
    state: State
    detail: str
    remedy: str = ""


def report(*, sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> list[Finding]:
    """Look at everything that decides how well forebay runs here.

    Args:
        sys: The sysfs root.
        proc: The proc root.
    """
    device = default_device()
    return [
        Finding(
            part="forebay",
            state=State.WORKS,
            detail=f"{forebay.__version__} with torch {torch.__version__}",
        ),
        _core(),
        _device(device),
        _triton(device),
        _page_locking(device),
        *_host(sys, proc),
        _huge_pages(sys),
        _cores(sys, proc),
        _numa(sys, proc),
        _processor_time(sys, proc),
        _drive(sys, proc),
        _direct_storage(device),
        _io_uring(),
        *_packages(),
    ]


def _core() -> Finding:
    core = native.core()
    level = core.kernel_level()
    if level == "fallback":
        return Finding(
            part="native core",
            state=State.MISSING,
            detail="the slow fallback computes: same bits, no overlap",
            remedy="install a C++20 compiler and CMake, then install forebay again",
        )
    levels = {"avx512": State.WORKS, "avx2": State.WORKS, "baseline": State.LIMITED}
    forced = os.environ.get("FOREBAY_KERNEL_LEVEL")
    return Finding(
        part="native core",
        state=levels[level],
        detail=f"kernels of level {level}"
        + (f" (FOREBAY_KERNEL_LEVEL={forced} asks for it)" if forced else ""),
        remedy="" if level != "baseline" else "a processor with AVX2 updates several times faster",
    )


def _io_uring() -> Finding:
    try:
        native.core().UringBackend(1)
    except RuntimeError as error:
        return Finding(
            part="io_uring",
            state=State.LIMITED,
            detail=f"{error}; state in files goes through threads, for two to three times the "
            "processor time",
            remedy="allow the io_uring system calls in the container's seccomp profile",
        )
    return Finding(part="io_uring", state=State.WORKS, detail="carries state to and from files")


def _device(device: torch.device) -> Finding:
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return Finding(
            part="accelerator",
            state=State.WORKS,
            detail=f"{device_name(device)}, {format_bytes(memory)}, driver API found",
        )
    built = torch.version.cuda
    return Finding(
        part="accelerator",
        state=State.MISSING,
        detail="no CUDA device; models train on the processor"
        + ("" if built else " (this torch is built without CUDA)"),
        remedy="check nvidia-smi" if built else "install a CUDA build of torch",
    )


def _triton(device: torch.device) -> Finding:
    found = importlib.util.find_spec("triton") is not None
    if device.type == "cpu":
        return Finding(
            part="triton",
            state=State.WORKS if found else State.MISSING,
            detail="not needed: updates on a GPU alone use it",
        )
    return Finding(
        part="triton",
        state=State.WORKS if found else State.MISSING,
        detail="updates on the device" if found else "units cannot update on the device",
        remedy="" if found else "pip install triton, which CUDA builds of torch bring along",
    )


def _page_locking(device: torch.device) -> Finding:
    if device.type == "cpu":
        return Finding(
            part="page-locking", state=State.WORKS, detail="not needed: copies are memcpy"
        )
    from forebay.tiers.host import HostArena
    from forebay.tiers.ledger import Ledger, Role
    from forebay.tiers.page_locking import PageLocking

    try:
        locking = PageLocking(accelerator_for(device).copy_engine(native.core()))
        arena = HostArena(
            1 << 20, ledger=Ledger({}), role=Role.STAGING, what="a test", page_locking=locking
        )
        locking.wait()
        arena.close()
        refusal = locking.refusal
    except (RuntimeError, ForebayError) as error:
        refusal = str(error)
    if refusal is not None:
        return Finding(
            part="page-locking",
            state=State.MISSING,
            detail=f"{refusal.splitlines()[0]}; copies run at a third of the link's rate",
            remedy="allow the process to lock memory (container option --ulimit memlock=-1)",
        )
    return Finding(part="page-locking", state=State.WORKS, detail="by the driver, exact in size")


def _host(sys: Path, proc: Path) -> Iterator[Finding]:
    ceiling = host_ceiling(sys=sys, proc=proc)
    size = "unknown" if ceiling.nbytes is None else format_bytes(ceiling.nbytes)
    limited = ceiling.limit is HostLimit.CGROUP
    yield Finding(
        part="host memory",
        state=State.LIMITED if limited else State.WORKS,
        detail=f"{size}, by {ceiling.limit.value}",
        remedy="raise the container's or job's memory limit to use all of it" if limited else "",
    )
    memlock = locked_memory_limit()
    yield Finding(
        part="memlock",
        state=State.WORKS,
        detail="unlimited"
        if memlock is None
        else f"{format_bytes(memlock)} (ulimit -l); CUDA's driver is not bound by it",
    )


def _huge_pages(sys: Path) -> Finding:
    chosen = huge_pages(sys)
    if chosen in ("always", "madvise"):
        return Finding(
            part="huge pages", state=State.WORKS, detail=f"transparent ones, on {chosen}"
        )
    return Finding(
        part="huge pages",
        state=State.LIMITED,
        detail=f"{sys / HUGE_PAGES} says {chosen or 'nothing'}: updates spend more time on address "
        "look-ups",
        remedy=f"write madvise to {sys / HUGE_PAGES}",
    )


def _cores(sys: Path, proc: Path) -> Finding:
    topology = Topology.read(sys, proc=proc)
    share = topology.share()
    nodes = len({core.node for core in topology.cores})
    few = len(topology.cores) < 4
    return Finding(
        part="cores",
        state=State.LIMITED if few else State.WORKS,
        detail=f"{share.summary}; {nodes} NUMA node{'s' if nodes > 1 else ''}",
        remedy="give the process more cores: updates on the host scale with them" if few else "",
    )


def _numa(sys: Path, proc: Path) -> Finding:
    nodes = len({core.node for core in Topology.read(sys, proc=proc).cores})
    if nodes == 1:
        return Finding(part="NUMA", state=State.WORKS, detail="one node: all memory is near")
    return Finding(
        part="NUMA",
        state=State.LIMITED,
        detail=f"{nodes} nodes: memory of another node is slower, and one rank spans all of them",
        remedy=f"start {nodes} ranks or a multiple, one for each device, so that each keeps to one",
    )


def _processor_time(sys: Path, proc: Path) -> Finding:
    quota = cpu_quota(sys / "fs" / "cgroup", proc=proc)
    if quota is None:
        return Finding(part="processor time", state=State.WORKS, detail="not limited by a group")
    return Finding(
        part="processor time",
        state=State.LIMITED,
        detail=f"a control group allows {quota:g} processors' worth; threads are not pinned",
        remedy="raise the container's or job's processor limit, or ask for whole cores",
    )


def _drive(sys: Path, proc: Path) -> Finding:
    here = Path.cwd()
    storage = storage_of(here, sys=sys, proc=proc)
    warnings = storage.warnings()
    if warnings:
        return Finding(
            part="drive",
            state=State.LIMITED,
            detail=f"{here} lies on {storage.kind}: {'; '.join(warnings)}",
            remedy="name a folder on a local NVMe drive as nvme_path, and measure it with "
            "forebay probe --drive FOLDER",
        )
    return Finding(
        part="drive",
        state=State.WORKS,
        detail=f"{here} lies on {storage.kind}; measure it with forebay probe --drive FOLDER",
    )


def _direct_storage(device: torch.device) -> Finding:
    found = find_direct_storage(device)
    if found.library is not None:
        return Finding(
            part="GPUDirect Storage",
            state=State.WORKS,
            detail=f"{found.reason}: weights in files go to the device directly, their checksums "
            "not compared (aio.use_gds: false turns it off)",
        )
    return Finding(
        part="GPUDirect Storage",
        state=State.MISSING,
        detail=f"{found.reason}; drives are reached through host memory",
        remedy="install NVIDIA's nvidia-fs driver and pip install forebay[gds], where a drive "
        "allows it",
    )


_PACKAGES = {
    "transformers": ("forebay train and bench step", "train"),
    "datasets": ("forebay train", "train"),
    "tensorboard": ("scalars for TensorBoard", "train"),
    "matplotlib": ("pictures of timelines", "dev"),
    "deepspeed": ("the peers of forebay bench step", ""),
}


def _packages() -> Iterator[Finding]:
    for name, (purpose, extra) in _PACKAGES.items():
        found = importlib.util.find_spec(name) is not None
        remedy = f'pip install "forebay[{extra}]"' if extra else f"pip install {name}"
        yield Finding(
            part=name,
            state=State.WORKS if found else State.MISSING,
            detail=f"for {purpose}",
            remedy="" if found else remedy,
        )
