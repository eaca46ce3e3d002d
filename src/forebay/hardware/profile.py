"""The profile: what was measured of one machine, as a file that says whose it is.

`forebay probe` writes it; the planner reads capacities and bandwidths from it. Catalogued machines
(`hardware.catalog`) have the same shape. A file of another machine, or of another version of the
format, is refused: wrong numbers plan worse than typical ones.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from forebay.errors import ConfigError
from forebay.hardware.affinity import allowed_cpus
from forebay.hardware.checking import decode
from forebay.hardware.rates import (
    UNCORRECTED,
    Corrections,
    Count,
    Drives,
    LayerRates,
    LinkRates,
    MatrixRate,
    Network,
    Node,
    Rate,
    System,
    ThreadRate,
)
from forebay.plan.solve import Rates

__all__ = [
    "PROFILE_VERSION",
    "Corrections",
    "Drives",
    "LayerRates",
    "LinkRates",
    "Machine",
    "MatrixRate",
    "Network",
    "Node",
    "Profile",
    "System",
    "ThreadRate",
    "load_profile",
    "read_profile",
]

PROFILE_VERSION = 3

# What any data-centre device of the last years reaches.
_DEVICE_MEMORY = 2e12

_HINT = "measure this machine with: forebay probe --output FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What makes two machines the same to a plan.

    Attributes:
        cpu: Model name of the processor.
        cpus: Logical processors that the process may use.
        device: Name of the accelerator; "cpu" without one.
    """

    cpu: str
    cpus: Count
    device: str

    @classmethod
    def read(cls, device: str, *, proc: Path = Path("/proc")) -> Machine:
        """This machine.

        Args:
            device: Name of the accelerator; "cpu" without one.
            proc: The proc root.
        """
        return cls(cpu=_cpu_model(proc), cpus=len(allowed_cpus()), device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured capacities and bandwidths of a machine.

    Attributes:
        machine: Whose they are.
        forebay: The version of forebay that measured.
        kernel_level: Level of the update kernels.
        threads: By thread count, ascending; at least one.
        link: The device-host link.
        matrix: Rates of matrix products on the device, by dtype and ascending size.
        device_memory: Bandwidth of a copy on the device, read plus written.
        layer: What a layer's other operations reach there; None where it was not measured.
        node: Capacities; None where nobody asked for them.
        drives: Drives for state; None without.
        network: Between ranks; None where it was not measured.
        system: What the system allowed meanwhile; None of a catalogued machine.
        corrections: What runs taught.
        version: Format of the file.
    """

    machine: Machine
    forebay: str
    kernel_level: str
    threads: tuple[ThreadRate, ...]
    link: LinkRates
    matrix: tuple[MatrixRate, ...] = ()
    device_memory: Rate | None = None
    layer: LayerRates | None = None
    node: Node | None = None
    drives: Drives | None = None
    network: Network | None = None
    system: System | None = None
    corrections: Corrections = UNCORRECTED
    version: Count = PROFILE_VERSION

    def rates(self) -> Rates:
        """The bandwidths that choosing places needs.

        Update and copies together reach what was measured with both at work, or what the update
        reaches alone where that is more.
        """
        best = max(rate.update for rate in self.threads) / self.corrections.host_update
        together = self.link.beside_update + self.link.update_beside
        return Rates(
            host_memory=max(best, together),
            link_up=self.link.up,
            link_down=self.link.down,
            update=best,
            both=self.link.both,
            both_beside_update=self.link.beside_update,
            down_beside_update=self.link.down_beside_update,
            update_beside_down=self.link.update_beside_down,
            device_memory=self.device_memory or _DEVICE_MEMORY,
            **self._file_rates(),
        )

    @property
    def corrected_drives(self) -> Drives | None:
        """The drives at the pace that runs taught."""
        if self.drives is None:
            return None
        return self.drives.faster(1 / self.corrections.drives)

    def _file_rates(self) -> dict[str, Any]:
        """Of the drives; none where they were not measured, so that typical ones hold."""
        drives = self.corrected_drives
        if drives is None:
            return {}
        return {"file_read": drives.read, "file_write": drives.write, "file_both": drives.both}

    def as_json(self) -> str:
        """The file's text."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_dict(cls, data: Any, *, source: str) -> Profile:
        """Read and check the content of a file.

        Args:
            data: Decoded JSON.
            source: The file's name, for messages.

        Raises:
            ConfigError: It is of another version, or a field is missing, unknown or absurd.
        """
        if not isinstance(data, dict) or "version" not in data:
            raise ConfigError(f"{source} is not a profile: it has no version", hint=_HINT)
        if data["version"] != PROFILE_VERSION:
            raise ConfigError(
                f"{source} is a profile of version {data['version']}, and this forebay reads "
                f"version {PROFILE_VERSION}",
                hint=_HINT,
            )
        profile = decode(cls, data, where=source, hint=_HINT)
        if not profile.threads:
            raise ConfigError(f"{source}: threads must be a list with at least one entry")
        profile._check_agreement(source)
        return profile

    def _check_agreement(self, source: str) -> None:
        """Refuse fields of which each by itself may be right, and not beside the others."""
        sizes: dict[str, int] = {}
        for place, row in enumerate(self.matrix):
            if row.size <= (before := sizes.get(row.dtype, 0)):
                raise ConfigError(
                    f"{source}: matrix[{place}]: size is {row.size}, after {before} of "
                    f"{row.dtype}; sizes of a dtype must ascend",
                    hint=_HINT,
                )
            sizes[row.dtype] = row.size
        if self.layer is not None and self.layer.dtype not in sizes:
            raise ConfigError(
                f"{source}: layer: dtype is {self.layer.dtype!r}; it must be one of matrix "
                f"({', '.join(sizes) or 'none'})",
                hint=_HINT,
            )
        drives = self.drives
        if drives and drives.both and drives.both > drives.read + drives.write:
            raise ConfigError(
                f"{source}: drives: both is {drives.both:g}; it must be at most "
                f"{drives.read + drives.write:g}, the sum of read and write",
                hint=_HINT,
            )

    def check_machine(self, machine: Machine, *, source: str) -> None:
        """Refuse a profile that was measured elsewhere.

        Raises:
            ConfigError: With both values of what differs.
        """
        differences = [
            f"{field.name} {getattr(self.machine, field.name)!r} there and "
            f"{getattr(machine, field.name)!r} here"
            for field in fields(Machine)
            if getattr(self.machine, field.name) != getattr(machine, field.name)
        ]
        if differences:
            raise ConfigError(
                f"{source} is the profile of another machine: {', '.join(differences)}",
                hint=_HINT,
            )


def read_profile(path: Path | str) -> Profile:
    """Read a profile of any machine, to plan for it.

    Raises:
        ConfigError: It cannot be read, is no profile, or is another version's.
    """
    source = f"profile {path}"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}", hint=_HINT) from error
    except ValueError as error:
        raise ConfigError(f"{source} is not JSON: {error}", hint=_HINT) from error
    return Profile.from_dict(data, source=source)


def load_profile(path: Path | str, *, device: str) -> Profile:
    """Read a profile of this machine.

    Args:
        path: The file.
        device: Name of the accelerator that is to be used; "cpu" without one.

    Raises:
        ConfigError: It cannot be read, is no profile, or is another machine's or version's.
    """
    profile = read_profile(path)
    profile.check_machine(Machine.read(device), source=f"profile {path}")
    return profile


def _cpu_model(proc: Path) -> str:
    try:
        lines = (proc / "cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "CPU part", "cpu model"):
            return value.strip()
    return "unknown"
