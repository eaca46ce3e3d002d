"""What machines are made of, in numbers: frozen values that profiles consist of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias

from forebay.hardware.checking import Between

__all__ = [
    "UNCORRECTED",
    "Bytes",
    "Corrections",
    "Count",
    "DriveUse",
    "Drives",
    "LayerRates",
    "LinkRates",
    "MatrixRate",
    "Network",
    "Node",
    "PassRate",
    "PassSeconds",
    "Rate",
    "System",
    "ThreadRate",
]

# A file with other numbers is no measurement. A floppy disk moves 1e5 bytes per second; no machine
# of today moves, computes or holds 1e18 of anything.
Rate: TypeAlias = Annotated[float, Between(1e5, 1e18)]
Bytes: TypeAlias = Annotated[int, Between(1, 1e18)]
Count: TypeAlias = Annotated[int, Between(1, 1e6)]
_Seconds: TypeAlias = Annotated[float, Between(1e-9, 100.0)]
# One run teaches a twentieth to twenty times; a file may have learned more than once.
_Factor: TypeAlias = Annotated[float, Between(1e-4, 1e4)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadRate:
    """What a number of threads reaches.

    Attributes:
        threads: Worker threads.
        update: Host memory traffic of the fused update pass, bytes per second.
        copy: Of a copy (bytes read plus bytes written), bytes per second.
    """

    threads: Count
    update: Rate
    copy: Rate


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

    up: Rate
    down: Rate
    both: Rate
    beside_update: Rate
    update_beside: Rate
    down_beside_update: Rate
    update_beside_down: Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRate:
    """What matrix products reach.

    Attributes:
        dtype: Of both factors.
        size: Their width and height.
        flops: Operations per second.
    """

    dtype: str
    size: Count
    flops: Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRate:
    """One kind of operation in both passes.

    Attributes:
        forward: In forward, per second.
        backward: In backward, per second.
    """

    forward: Rate
    backward: Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeconds:
    """What takes the same time however much is computed, in both passes.

    Attributes:
        forward: In forward.
        backward: In backward.
    """

    forward: _Seconds
    backward: _Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRates:
    """What a transformer layer reaches on the device beside its matrix products.

    Rates are of what `layer_work` counts: bytes per second, of attention operations per second.

    Attributes:
        dtype: Of what was measured.
        norm: An RMS norm of single operations, as transformers writes it.
        fused_norm: A layer norm in one operation.
        rotation: Rotary positions.
        activation: An activation and the product with the other half.
        attention: Causal attention in one operation.
        loss: Cross entropy of logits that become fp32.
        issue: What the processor needs to issue one layer to the device; on `cpu`, what a layer
            costs beside its work.
    """

    dtype: str
    norm: PassRate
    fused_norm: PassRate
    rotation: PassRate
    activation: PassRate
    attention: PassRate
    loss: PassRate
    issue: PassSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What one machine holds.

    Attributes:
        devices: Accelerators.
        cores: Physical cores.
        device_bytes: Memory of each device.
        host_bytes: Memory of the host.
        uplinks: Device-host links that run at full rate at the same time.
        numa_nodes: Memories that the host's cores are divided over.
    """

    devices: Count
    cores: Count
    device_bytes: Bytes
    host_bytes: Bytes
    uplinks: Count
    numa_nodes: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Drives:
    """The drives of one machine, all together.

    Attributes:
        count: How many.
        capacity_bytes: What they hold.
        read: Bytes per second, alone.
        write: Bytes per second, alone.
        both: Reads and writes at once, together; None where that was not measured, and each is as
            fast as alone.
    """

    count: Count
    capacity_bytes: Bytes
    read: Rate
    write: Rate
    both: Rate | None = None

    def as_many(self, count: int) -> Drives:
        """So many drives of the same kind.

        Example:
            >>> Drives(count=2, capacity_bytes=4, read=6.0, write=2.0).as_many(3)
            Drives(count=3, capacity_bytes=6, read=9.0, write=3.0, both=None)
        """
        scale = count / self.count
        held = replace(self, count=count, capacity_bytes=int(self.capacity_bytes * scale))
        return held.faster(scale)

    def faster(self, times: float) -> Drives:
        """The same drives, so many times as fast."""
        both = None if self.both is None else times * self.both
        return replace(self, read=times * self.read, write=times * self.write, both=both)

    def seconds_at_once(self, *, bytes_read: float, bytes_written: float) -> float:
        """Seconds of a read and a write that begin together; the longer goes on alone.

        Example:
            >>> # 4 s of both, then 2 s of writing
            >>> drives = Drives(count=1, capacity_bytes=1, read=4.0, write=2.0, both=3.0)
            >>> drives.seconds_at_once(bytes_read=8, bytes_written=8)
            6.0
        """
        alone = self.read + self.write
        slower = 1.0 if self.both is None else min(1.0, self.both / alone)
        read, write = slower * self.read, slower * self.write
        both = min(bytes_read / read, bytes_written / write)
        rest = (
            (bytes_read - both * read) / self.read,
            (bytes_written - both * write) / self.write,
        )
        return both + max(rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveUse:
    """What a run's process did with its files.

    Attributes:
        bytes_read: In all.
        read_seconds: In which something was read.
        bytes_written: In all.
        write_seconds: In which something was written.
    """

    bytes_read: int
    read_seconds: float
    bytes_written: int
    write_seconds: float

    def times_as_long(self, drives: Drives, *, sharers: int) -> float:
        """How many times as long it took as drives take that so many processes share evenly.

        State is read and written at the same time; the direction that takes longer counts, as
        blocks of both wait in one queue, so that the faster is busy for as long.

        Example:
            >>> drives = Drives(count=1, capacity_bytes=1, read=4.0, write=2.0)
            >>> DriveUse(
            ...     bytes_read=8, read_seconds=6.0, bytes_written=8, write_seconds=6.0
            ... ).times_as_long(drives, sharers=1)
            1.5
        """
        expected = drives.seconds_at_once(
            bytes_read=self.bytes_read, bytes_written=self.bytes_written
        )
        return max(self.read_seconds, self.write_seconds) / (sharers * expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Between ranks.

    Attributes:
        inside: What one device sends to others of its node, bytes per second.
        across: What one node sends to others, bytes per second; None where there is one node.
        latency_seconds: Of one collective.
    """

    inside: Rate
    across: Rate | None = None
    latency_seconds: _Seconds = 20e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What the system allowed while the rest was measured: figures of another setting differ.

    Attributes:
        huge_pages: Setting of transparent huge pages; "unknown" where the system has none.
        direct_storage: "works" where GPUDirect Storage's driver and library are there, else
            "missing".
        memlock_bytes: What the process may lock by itself; None without a limit.
        memory_limit_bytes: Memory that control groups allow; None without a limit.
        processor_limit: Processors' worth that they allow; None without a limit.
        torch_threads: Threads of one torch operation on the host, which rates of a device "cpu"
            follow; None where nobody noted them.
    """

    huge_pages: str
    direct_storage: str
    memlock_bytes: Annotated[int, Between(0, 1e18)] | None = None
    memory_limit_bytes: Bytes | None = None
    processor_limit: Annotated[float, Between(1e-3, 1e6)] | None = None
    torch_threads: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """Factors that runs on this machine taught; what is predicted is multiplied by them.

    Attributes:
        compute: Of seconds of forward and backward.
        host_update: Of seconds of updates on the host.
        activations: Of bytes of activations on the device.
        drives: Of seconds of reads and writes of drives.
        runs: How many runs they come from.
    """

    compute: _Factor = 1.0
    host_update: _Factor = 1.0
    activations: _Factor = 1.0
    drives: _Factor = 1.0
    runs: Count | None = None


UNCORRECTED = Corrections()
