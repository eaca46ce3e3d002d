"""The profile: what was measured of one machine, as a file that says whose it is.

`forebay probe` writes it; the planner reads bandwidths from it. A profile of another machine, or
of another version of the format, is refused: wrong numbers plan worse than typical ones.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from forebay.errors import ConfigError
from forebay.hardware.affinity import allowed_cpus
from forebay.plan.solve import Rates

__all__ = ["PROFILE_VERSION", "LinkRates", "Machine", "Profile", "ThreadRate", "load_profile"]

PROFILE_VERSION = 1

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
    cpus: int
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
class ThreadRate:
    """What a number of threads reaches.

    Attributes:
        threads: Worker threads.
        update: Host memory traffic of the fused update pass, bytes per second.
        copy: Of a copy (bytes read plus bytes written), bytes per second.
    """

    threads: int
    update: float
    copy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """The device-host link, bytes per second.

    Attributes:
        up: To the device, alone.
        down: To the host, alone.
        both: Both directions at once, together.
        beside_update: Both directions together while the update runs.
        update_beside: Host memory traffic of the update meanwhile.
        down_beside_update: To the host while the update runs and nothing goes up, as in the
            window between the clip factor and the last new weight.
        update_beside_down: Host memory traffic of the update meanwhile.
    """

    up: float
    down: float
    both: float
    beside_update: float
    update_beside: float
    down_beside_update: float
    update_beside_down: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured capacities and bandwidths of a machine.

    Attributes:
        machine: Whose they are.
        forebay: The version of forebay that measured.
        kernel_level: Level of the update kernels.
        threads: By thread count, ascending; at least one.
        link: The device-host link.
        matrix_flops: Sustained bf16 matrix rate of the device, FLOP per second; None on cpu.
        device_memory: Bandwidth of a copy on the device, read plus written; None on cpu.
        version: Format of the file.
    """

    machine: Machine
    forebay: str
    kernel_level: str
    threads: tuple[ThreadRate, ...]
    link: LinkRates
    matrix_flops: float | None = None
    device_memory: float | None = None
    version: int = PROFILE_VERSION

    def rates(self) -> Rates:
        """The bandwidths that choosing places needs.

        Update and copies together reach what was measured with both at work, or what the update
        reaches alone where that is more.
        """
        best = max(rate.update for rate in self.threads)
        together = self.link.beside_update + self.link.update_beside
        return Rates(
            host_memory=max(best, together),
            link_up=self.link.up,
            link_down=self.link.down,
            update=best,
            down_beside_update=self.link.down_beside_update,
            update_beside_down=self.link.update_beside_down,
        )

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
        known = _checked(cls, data, where=source)
        rows = known["threads"]
        if not isinstance(rows, list) or not rows:
            raise ConfigError(f"{source}: threads must be a list with at least one entry")
        known["threads"] = tuple(_numbers(ThreadRate, row, f"{source}: threads") for row in rows)
        known["link"] = _numbers(LinkRates, known["link"], f"{source}: link")
        machine = _checked(Machine, known["machine"], where=f"{source}: machine")
        known["machine"] = Machine(**machine)
        for name in ("matrix_flops", "device_memory"):
            if known.get(name) is not None:
                _check_rate(known[name], f"{source}: {name}")
        return cls(**known)

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


def load_profile(path: Path | str, *, device: str) -> Profile:
    """Read a profile of this machine.

    Args:
        path: The file.
        device: Name of the accelerator that is to be used; "cpu" without one.

    Raises:
        ConfigError: It cannot be read, is no profile, or is another machine's or version's.
    """
    source = f"profile {path}"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}", hint=_HINT) from error
    except ValueError as error:
        raise ConfigError(f"{source} is not JSON: {error}", hint=_HINT) from error
    profile = Profile.from_dict(data, source=source)
    profile.check_machine(Machine.read(device), source=source)
    return profile


def _checked(kind: Any, data: Any, *, where: str) -> dict[str, Any]:
    """The fields of a dataclass, none missing that has no default and none unknown."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must be an object, not {type(data).__name__}", hint=_HINT)
    names = {field.name for field in fields(kind)}
    optional = {"matrix_flops", "device_memory", "version"}
    for problem, found in (
        ("is not known", sorted(set(data) - names)),
        ("is missing", sorted(names - set(data) - optional)),
    ):
        if found:
            raise ConfigError(f"{where}: {found[0]} {problem}", hint=_HINT)
    return dict(data)


def _numbers(kind: Any, data: Any, where: str) -> Any:
    known = _checked(kind, data, where=where)
    for name, value in known.items():
        _check_rate(value, f"{where}.{name}")
    return kind(**known)


def _check_rate(value: Any, where: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # No machine of today moves or computes 1e18 of anything in a second.
    if not number or not math.isfinite(value) or not 0 < value < 1e18:
        raise ConfigError(f"{where} is {value!r}; it must be a number between 0 and 1e18")


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
