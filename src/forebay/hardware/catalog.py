"""Machines that nobody here has: what their data sheets say, as profiles.

A sheet holds public figures as they are published, each with its source. One set of factors for
all machines turns peaks into what is reached; no factor belongs to one machine. Where one was
measured, it was on one H200 with 16 cores (`docs/plan.md`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from forebay.errors import ConfigError
from forebay.hardware.profile import (
    Drives,
    LayerRates,
    LinkRates,
    Machine,
    MatrixRate,
    Network,
    Node,
    Profile,
    ThreadRate,
)
from forebay.hardware.rates import PassRate, PassSeconds
from forebay.hardware.sheets import SHEETS
from forebay.hardware.sources import GRACE, HERE, INFINITY, OURS, Source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.hardware.sheets import Sheet

__all__ = [
    "CATALOG",
    "FACTOR_SOURCES",
    "LINKS",
    "LINK_SOURCES",
    "Factors",
    "machine_named",
    "profile_of",
]


_LAYER: Final = LayerRates(
    dtype="bfloat16",
    norm=PassRate(forward=0.67, backward=0.61),
    fused_norm=PassRate(forward=0.64, backward=0.55),
    rotation=PassRate(forward=0.27, backward=0.41),
    activation=PassRate(forward=0.97, backward=1.11),
    attention=PassRate(forward=0.63, backward=0.56),
    loss=PassRate(forward=0.55, backward=1.03),
    issue=PassSeconds(forward=1.3e-3, backward=1.7e-3),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What is reached of published peaks, on every machine alike; `FACTOR_SOURCES` says whence.

    Attributes:
        matrix: Of dense tensor-core peak.
        device_memory: Of its peak, by a copy.
        host_memory: Of its peak, by updates.
        core_update: Bytes per second of the update pass that one core reaches.
        both: Both directions of a link together, against one alone.
        inside: Of the devices' own links, by an all-reduce.
        across: Of the network's, what protocol and framing leave.
        layer: Of a copy in device memory, by a layer's operations; attention's of what matrix
            products reach; `issue` in seconds, by a processor of a server.
    """

    matrix: float = 0.81
    device_memory: float = 0.885
    host_memory: float = 0.72
    core_update: float = 11e9
    both: float = 1.84
    inside: float = 0.8
    across: float = 0.9
    layer: LayerRates = _LAYER


_FACTORS: Final = Factors()

FACTOR_SOURCES: Final[Mapping[str, Source]] = MappingProxyType(
    {
        "matrix": replace(HERE, note="799 of 989 TFLOPS; 687 in committed profiles"),
        "device_memory": replace(HERE, note="4.25 of 4.8 TB/s"),
        "host_memory": Source(
            document="a measurement of Adam on a Grace processor: 368 of 512 GB/s",
            note="who made it could not be found again",
        ),
        "core_update": replace(HERE, note="45 GB/s by 4 cores; 70 in committed profiles"),
        "both": replace(HERE, note="101 against 55 GB/s; 98 against 54 in committed profiles"),
        "inside": Source(
            document="NCCL on NVLink 4: about 370 of 450 GB/s",
            seen="https://github.com/NVIDIA/nccl/issues/1374",
        ),
        "across": Source(
            document="nccl-tests on 4 x 200 Gb/s: 85 to 96 of 100 GB/s",
            seen="https://github.com/NVIDIA/nccl-tests/issues/119",
        ),
        "layer": replace(HERE, note="by `forebay probe`, forward and backward"),
        "widths": replace(
            OURS, note="narrow products: waves of 128 x 128 tiles on a hundred multiprocessors"
        ),
    }
)

# Page-locked copies, up and down, by generation of PCIe x16, and over NVLink-C2C.
LINKS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {"3": (12e9, 12e9), "4": (25e9, 25e9), "5": (55e9, 55e9), "c2c": (375e9, 297e9)}
)
LINK_SOURCES: Final[Mapping[str, Source]] = MappingProxyType(
    {
        "3": INFINITY,
        "4": Source(
            document="nvbandwidth on 8 x A100: 24.8 GB/s",
            seen="NVIDIA developer forums, topic 352186",
        ),
        "5": Source(
            document="nvbandwidth, NVIDIA's own description: 55.6 GB/s; 53.8 here",
            seen="NVIDIA technical blog on NVbandwidth",
        ),
        "c2c": replace(GRACE, document="Schieffer et al. 2024, arXiv 2407.07850"),
    }
)

# Products narrower than this do not fill a large device: see "widths" above.
_SIZES: Final = ((512, 0.25), (1024, 0.6), (2048, 0.85), (4096, 1.0))


def profile_of(sheet: Sheet, *, factors: Factors = _FACTORS) -> Profile:
    """The profile that a machine's sheet leads to."""
    up, down = LINKS[sheet.link]
    both = factors.both * (up + down) / 2
    update = min(factors.host_memory * sheet.host_memory, factors.core_update * sheet.cores)
    copies = min(both * sheet.uplinks, factors.host_memory * sheet.host_memory)
    matrix = tuple(
        MatrixRate(
            dtype=dtype,
            size=size,
            flops=share * sheet.matrix_reached.get(dtype, factors.matrix * peak),
        )
        for dtype, peak in sheet.matrix.items()
        for size, share in _SIZES
    )
    network = Network(
        inside=factors.inside * sheet.inside if sheet.devices > 1 else up,
        across=factors.across * sheet.across if sheet.across else None,
    )
    drives = None
    if sheet.drives:
        drives = Drives(
            count=sheet.drives,
            capacity_bytes=sheet.drives * sheet.drive_bytes,
            read=sheet.drives * sheet.drive_read,
            write=sheet.drives * sheet.drive_write,
        )
    return Profile(
        machine=Machine(cpu=sheet.cpu, cpus=sheet.cores, device=sheet.device),
        forebay="catalog",
        kernel_level="avx2",
        threads=(ThreadRate(threads=sheet.cores, update=update, copy=update),),
        link=LinkRates(
            up=up,
            down=down,
            both=both,
            # The update takes what copies leave: together they reach what memory gives.
            beside_update=copies / 2,
            update_beside=max(update - copies / 2, update / 4),
            down_beside_update=min(down, update / 2),
            update_beside_down=update - min(down, update / 2),
        ),
        matrix=matrix,
        device_memory=factors.device_memory * sheet.device_memory,
        layer=_layer(factors, sheet=sheet),
        node=Node(
            devices=sheet.devices,
            cores=sheet.cores,
            device_bytes=sheet.device_bytes,
            host_bytes=sheet.host_bytes,
            uplinks=sheet.uplinks,
            numa_nodes=sheet.numa_nodes,
        ),
        drives=drives,
        network=network,
    )


def _layer(factors: Factors, *, sheet: Sheet) -> LayerRates:
    """What a layer's other operations reach there."""

    def of(share: PassRate, whole: float) -> PassRate:
        return PassRate(forward=share.forward * whole, backward=share.backward * whole)

    shares, memory = factors.layer, factors.device_memory * sheet.device_memory
    dtype, peak = next(iter(sheet.matrix.items()))
    kinds = {
        field.name: of(getattr(shares, field.name), memory)
        for field in fields(LayerRates)
        if field.name not in {"dtype", "attention", "issue"}
    }
    matrix = sheet.matrix_reached.get(dtype, factors.matrix * peak)
    return LayerRates(
        dtype=dtype, attention=of(shares.attention, matrix), issue=shares.issue, **kinds
    )


CATALOG: Final[Mapping[str, Profile]] = MappingProxyType(
    {name: profile_of(sheet) for name, sheet in SHEETS.items()}
)


def machine_named(name: str) -> Profile:
    """A catalogued machine.

    Raises:
        ConfigError: There is none of that name; lists all.

    Example:
        >>> machine_named("h100").node.devices
        8
    """
    try:
        return CATALOG[name.lower()]
    except KeyError:
        raise ConfigError(
            f"--machine {name!r} is not in the catalog, which knows {', '.join(CATALOG)}",
            hint="measure yours with: forebay probe --output FILE, then plan with --profile FILE",
        ) from None
