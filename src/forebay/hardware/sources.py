"""Where a catalogued figure is from: who published it, and a public page on which it was seen.

Figures were looked up once, one by one; "" says that no page could be found, so that the figure
rests on the document that is named, or on nobody's word where there is no such document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = [
    "A100",
    "DGX2",
    "DGXA",
    "DGXH",
    "GRACE",
    "H100",
    "H200",
    "HERE",
    "INFINITY",
    "MLPERF",
    "OURS",
    "PM1733",
    "RTX_4090",
    "V100",
    "Source",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of one figure or of several.

    Attributes:
        document: What published it, as one would look for it.
        seen: A public page that says the same, by publisher and title or address; "" where none
            was found.
        note: What a reader should know of it.
    """

    document: str
    seen: str = ""
    note: str = ""

    @property
    def is_found(self) -> bool:
        """Whether a public page says the same."""
        return bool(self.seen)


DGX2: Final = Source(
    document="NVIDIA DGX-2 data sheet (2018)",
    seen="PC Perspective, NVIDIA announces DGX-2 (March 2018)",
)
V100: Final = Source(
    document="NVIDIA Tesla V100 data sheet and Volta white paper",
    seen="Mao Song, NVIDIA GPU specs",
)
INFINITY: Final = Source(
    document="Rajbhandari et al., ZeRO-Infinity (2021), arXiv 2104.07857",
    note="no page shows its text",
)
DGXA: Final = Source(
    document="NVIDIA DGX A100 data sheet and system architecture white paper (2020)",
    seen="Hardware Times, NVIDIA's Ampere-based DGX A100 servers (2020)",
)
A100: Final = Source(document="NVIDIA A100 data sheet", seen="Glenn K. Lockwood, A100")
DGXH: Final = Source(
    document="NVIDIA DGX H100/H200 data sheet and user guide",
    seen="NVIDIA DGX BasePOD reference architecture, core components",
)
H100: Final = Source(
    document="NVIDIA H100 data sheet (SXM)",
    seen="Glenn K. Lockwood, H100",
)
H200: Final = Source(
    document="NVIDIA H200 data sheet (SXM)",
    seen="IT KB, NVIDIA H200 vs B300 (June 2026)",
)
MLPERF: Final = Source(
    document="MLPerf Inference 4.1, NVIDIA's system H200-SXM-141GBx8",
    seen="https://github.com/mlcommons/inference_results_v4.1",
)
RTX_4090: Final = Source(
    document="NVIDIA Ada GPU architecture white paper, appendix A",
    seen="WareDB, GeForce RTX 4090",
)
GRACE: Final = Source(
    document="NVIDIA GH200 Grace Hopper Superchip data sheet",
    seen="4now News, Not so simple and not so fast (July 2024)",
)
PM1733: Final = Source(
    document="Samsung PM1733 3.84 TB data sheet",
    seen="Hardwareluxx, Samsungs SSDs sterben nicht mehr (2019)",
    note="NVIDIA names no drive; this is one of the kind",
)
# Measured by forebay on one H200 with 16 cores.
HERE: Final = Source(
    document="measured on an H200 with 16 cores", seen="benchmarks/results", note="our own"
)
OURS: Final = Source(document="an assumption", note="nobody published it")
