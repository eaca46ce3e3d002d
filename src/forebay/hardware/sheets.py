"""What vendors and papers publish about machines, figure by figure, each with its source.

Bytes per second are per direction; capacities are what the part's name promises (32 GB of HBM are
32 GiB to CUDA). Nothing here is reached in practice: `hardware.catalog` says how much is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from forebay.hardware.sources import (
    A100,
    DGX2,
    DGXA,
    DGXH,
    GRACE,
    H100,
    H200,
    INFINITY,
    MLPERF,
    OURS,
    PM1733,
    RTX_4090,
    V100,
    Source,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SHEETS", "Sheet"]

_GIB: Final = 1 << 30
_TB: Final = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """One machine as it is sold.

    Attributes:
        title: Its name.
        device: Name of its accelerator.
        devices: How many.
        device_bytes: Memory of each.
        device_memory: Bandwidth of that memory, bytes per second.
        matrix: Dense peak of tensor cores by dtype, FLOP per second.
        matrix_reached: What large products reached, where that was published; else one factor
            for all machines (`hardware.catalog`) is applied to the peak.
        link: PCIe generation of a device's x16 link, or "c2c".
        uplinks: Such links that run at full rate at once.
        cpu: Processors.
        cores: Physical cores of all.
        numa_nodes: Sockets or dies with memory of their own.
        host_bytes: Host memory.
        host_memory: Its peak bandwidth.
        drives: NVMe drives for data.
        drive_bytes: Capacity of each.
        drive_read: Of each, sequential.
        drive_write: Of each, sequential.
        inside: Device to device in the machine.
        across: The machine's network adapters together; 0 without.
        sources: Where each figure is from, by field, or by several with commas between.
    """

    title: str
    device: str
    devices: int
    device_bytes: int
    device_memory: float
    matrix: Mapping[str, float]
    matrix_reached: Mapping[str, float] = field(default_factory=dict)
    link: str
    uplinks: int
    cpu: str
    cores: int
    numa_nodes: int
    host_bytes: int
    host_memory: float
    drives: int
    drive_bytes: int = 3_840_000_000_000
    drive_read: float
    drive_write: float
    inside: float
    across: float
    sources: Mapping[str, Source] = field(default_factory=dict)


# fp32 products stay on the plain cores unless TF32 is allowed, which forebay leaves to the user.
_V100_32 = Sheet(
    title="DGX-2: 16 x V100 32 GB",
    device="Tesla V100-SXM3-32GB",
    devices=16,
    device_bytes=32 * _GIB,
    device_memory=900e9,
    matrix=MappingProxyType({"float16": 125e12, "float32": 15.7e12}),
    matrix_reached=MappingProxyType({"float16": 70e12}),
    link="3",
    uplinks=4,
    cpu="2 x Intel Xeon Platinum 8168",
    cores=48,
    numa_nodes=2,
    host_bytes=1536 * _GIB,
    # 2 sockets x 6 channels x DDR4-2666 (8 bytes)
    host_memory=2 * 6 * 21.3e9,
    drives=8,
    drive_read=3.2e9,
    drive_write=3.0e9,
    # NVLink 2 through NVSwitch: 300 GB/s in both directions
    inside=150e9,
    # 8 x 100 Gb/s
    across=100e9,
    sources=MappingProxyType(
        {
            "device, devices, device_bytes, host_bytes, across, inside": DGX2,
            "drives, drive_bytes": replace(
                DGX2,
                seen="DatacenterDynamics, Two petaflops in a box (2018)",
                note="30 TB in all",
            ),
            "device_memory": replace(
                V100,
                seen="io-tech, NVIDIA esitteli Tesla V100 (2017)",
            ),
            "matrix": V100,
            "matrix_reached": replace(INFINITY, note="section 4.2: 70 TFLOPS are reached"),
            "link, uplinks": replace(
                INFINITY, note="section 6.1, table 2: 12 GB/s for one device, 3.0 for each of 16"
            ),
            "cpu, cores, numa_nodes": replace(DGX2, seen="", note="pages name the family alone"),
            "host_memory": Source(
                document="Intel Xeon Platinum 8168: 6 channels DDR4-2666",
                seen="AM Computers, Intel Xeon Skylake-SP ufficiali (2017)",
            ),
            "drive_read": replace(INFINITY, note="about 25 GB/s from 8 drives, 1.6 per device"),
            "drive_write": replace(OURS, note="a little below reads"),
        }
    ),
)

_A100_40 = Sheet(
    title="DGX A100 320GB: 8 x A100 40 GB",
    device="NVIDIA A100-SXM4-40GB",
    devices=8,
    device_bytes=40 * _GIB,
    device_memory=1555e9,
    matrix=MappingProxyType({"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}),
    link="4",
    uplinks=4,
    cpu="2 x AMD EPYC 7742",
    cores=128,
    numa_nodes=2,
    host_bytes=1024 * _GIB,
    # 2 sockets x 8 channels x DDR4-3200
    host_memory=2 * 8 * 25.6e9,
    drives=4,
    drive_read=6.4e9,
    drive_write=3.8e9,
    # NVLink 3: 600 GB/s in both directions
    inside=300e9,
    # 8 x 200 Gb/s
    across=200e9,
    sources=MappingProxyType(
        {
            "device, devices, cpu, cores, numa_nodes, host_bytes, drives, drive_bytes": DGXA,
            "across": replace(
                DGXA,
                seen="Geektopia, NVIDIA anuncia el servidor DGX-A100 (May 2020)",
            ),
            "uplinks": replace(
                DGXA,
                seen="Vengineer, NVIDIA H100's CX7 (May 2022)",
                note="two devices behind each of four PCIe switches",
            ),
            "link, device_bytes, device_memory, matrix, inside": A100,
            "host_memory": Source(
                document="AMD EPYC 7742: 8 channels DDR4-3200",
                seen="Tom's Hardware, AMD confirms twelve DDR5 memory channels (December 2021)",
            ),
            "drive_read, drive_write": PM1733,
        }
    ),
)

_A100_80 = replace(
    _A100_40,
    title="DGX A100 640GB: 8 x A100 80 GB",
    device="NVIDIA A100-SXM4-80GB",
    device_bytes=80 * _GIB,
    device_memory=2039e9,
    host_bytes=2048 * _GIB,
    drives=8,
    sources=MappingProxyType(
        {
            **_A100_40.sources,
            "device, devices, cpu, cores, numa_nodes, host_bytes, drives, drive_bytes": replace(
                DGXA,
                seen="PCNews, NVIDIA DGX A100 (2020)",
            ),
        }
    ),
)

_RTX_4090 = Sheet(
    title="Workstation: 1 x RTX 4090",
    device="NVIDIA GeForce RTX 4090",
    devices=1,
    device_bytes=24 * _GIB,
    device_memory=1008e9,
    # with fp32 accumulation
    matrix=MappingProxyType({"bfloat16": 165.2e12, "float16": 165.2e12, "float32": 82.6e12}),
    link="4",
    uplinks=1,
    cpu="AMD Ryzen 9 7950X",
    cores=16,
    numa_nodes=1,
    host_bytes=128 * _GIB,
    # 2 channels x DDR5-5200
    host_memory=2 * 41.6e9,
    drives=1,
    drive_bytes=2 * _TB,
    drive_read=7.0e9,
    drive_write=5.1e9,
    inside=0.0,
    across=0.0,
    sources=MappingProxyType(
        {
            "device, device_bytes, device_memory, matrix": RTX_4090,
            "cpu, cores, host_memory": Source(
                document="AMD Ryzen 9 7950X specifications: 2 channels DDR5-5200",
                seen="AutoAI, AMD Ryzen 9 7950X",
            ),
            "host_bytes": replace(OURS, note="the most that its four slots took when it was sold"),
            "link, uplinks": replace(
                RTX_4090,
                seen="Puget Systems, NVIDIA GeForce RTX 4090 24GB",
                note="one slot of PCIe 4 x16",
            ),
            "drive_bytes, drive_read, drive_write": Source(
                document="Samsung 980 PRO 2 TB data sheet",
                seen="Puget Systems, Samsung 980 Pro 2TB",
            ),
            "devices, numa_nodes, drives, inside, across": replace(OURS, note="one of everything"),
        }
    ),
)

_H100 = Sheet(
    title="DGX H100: 8 x H100 80 GB",
    device="NVIDIA H100 80GB HBM3",
    devices=8,
    device_bytes=80 * _GIB,
    device_memory=3350e9,
    matrix=MappingProxyType({"bfloat16": 989e12, "float16": 989e12, "float32": 67e12}),
    link="5",
    uplinks=8,
    cpu="2 x Intel Xeon Platinum 8480C",
    cores=112,
    numa_nodes=2,
    host_bytes=2048 * _GIB,
    # 2 sockets x 8 channels x DDR5-4800
    host_memory=2 * 8 * 38.4e9,
    drives=8,
    drive_read=6.4e9,
    drive_write=3.8e9,
    # NVLink 4: 900 GB/s in both directions
    inside=450e9,
    # 8 x 400 Gb/s
    across=400e9,
    sources=MappingProxyType(
        {
            "device, device_bytes, device_memory, matrix, inside": H100,
            "devices, cpu, cores, numa_nodes, host_bytes, link": MLPERF,
            "across": replace(MLPERF, note="ten cards of 400 Gb/s, eight of them for exchanges"),
            "drives, drive_bytes": DGXH,
            "uplinks": replace(
                DGXH,
                seen="Vengineer, NVIDIA H100's CX7 (May 2022)",
                note="each device behind a card of its own",
            ),
            "host_memory": Source(
                document="Intel Xeon Platinum 8480C: 8 channels DDR5-4800",
                seen="ServeTheHome, Intel Xeon Max 9480 deep dive; Dell PowerEdge XE9680 manual",
            ),
            "drive_read, drive_write": PM1733,
        }
    ),
)

_H200 = replace(
    _H100,
    title="DGX H200: 8 x H200 141 GB",
    device="NVIDIA H200",
    # CUDA reports 139.8 GiB
    device_bytes=141 * 10**9,
    device_memory=4800e9,
    sources=MappingProxyType(
        {
            **{names: source for names, source in _H100.sources.items() if source is not H100},
            "device, device_bytes, device_memory, matrix, inside": H200,
        }
    ),
)

_GH200 = Sheet(
    title="GH200: 1 x Grace Hopper 96 GB",
    device="NVIDIA GH200 96GB HBM3",
    devices=1,
    device_bytes=96 * _GIB,
    device_memory=4000e9,
    matrix=MappingProxyType({"bfloat16": 989e12, "float16": 989e12, "float32": 67e12}),
    link="c2c",
    uplinks=1,
    cpu="NVIDIA Grace",
    cores=72,
    numa_nodes=1,
    host_bytes=480 * _GIB,
    host_memory=512e9,
    drives=2,
    drive_read=6.4e9,
    drive_write=3.8e9,
    inside=0.0,
    # 400 Gb/s
    across=50e9,
    sources=MappingProxyType(
        {
            "device, device_bytes, device_memory, host_bytes, host_memory": GRACE,
            "matrix": replace(H100, note="the same die"),
            "cpu, cores": replace(GRACE, seen="Spheron, NVIDIA GH200 guide (January 2026)"),
            "link": replace(
                GRACE,
                document="Schieffer et al. 2024, arXiv 2407.07850",
                note="375 GB/s up and 297 down were measured of 450 each way",
            ),
            "devices, uplinks, numa_nodes, inside": replace(OURS, note="one of everything"),
            "drives, drive_bytes, across": replace(OURS, note="no data sheet says of such a node"),
            "drive_read, drive_write": PM1733,
        }
    ),
)

SHEETS: Final[Mapping[str, Sheet]] = MappingProxyType(
    {
        "v100-32": _V100_32,
        "a100-40": _A100_40,
        "a100-80": _A100_80,
        "4090": _RTX_4090,
        "h100": _H100,
        "h200": _H200,
        "gh200": _GH200,
    }
)
