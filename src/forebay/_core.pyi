"""Native core: update kernels, worker pool and links. Use it through `forebay.native.core()`.

Element types are the strings "float32", "bfloat16" and "float16"; addresses and handles are
integers. The core owns no memory: whatever an address points at must stay alive until the ticket
of the work has ended. All methods are thread-safe, and none but the waits and `close` block.
Refused arguments raise ValueError before anything changes; failed work raises RuntimeError from
its ticket's waits.
"""

from collections.abc import Sequence
from typing import Literal

_DType = Literal["float32", "bfloat16", "float16"]

def kernel_level() -> Literal["avx512", "avx2", "baseline"]:
    """The level that a new Pool takes: the best one, or what FOREBAY_KERNEL_LEVEL names."""

def convert(dst: int, dst_dtype: _DType, src: int, src_dtype: _DType, elements: int) -> None:
    """Convert element by element: bf16 rounds half away from zero, fp16 half to even."""

def split(bits: int, hi: int, low: int, elements: int) -> None:
    """Cut fp32 values into bf16 weights and the 16 bits beside them; lossless."""

def join(bits: int, hi: int, low: int, elements: int) -> None:
    """Put fp32 values together again; the inverse of `split`, same argument order."""

def crc32c(address: int, nbytes: int, seed: int = 0) -> int:
    """CRC-32C (Castagnoli) of bytes that follow bytes of the checksum `seed` (0: none).

    Releases the GIL. The check value, of b"123456789", is 0xE3069283.
    """

class Ticket:
    """Work under way: counted in pieces, ended once, done or failed."""

    @staticmethod
    def completed() -> Ticket:
        """A ticket without pieces that is done."""

    @property
    def pieces(self) -> int: ...
    @property
    def pieces_done(self) -> int: ...
    @property
    def pieces_issued(self) -> int: ...
    @property
    def done(self) -> bool: ...
    @property
    def failed(self) -> bool: ...
    def wait(self, timeout_s: float = -1.0) -> bool:
        """Block until done; False on time-out (negative: none).

        Raises:
            RuntimeError: The work, or work that it depends on, failed.
            KeyboardInterrupt: Signals are looked at every 100 ms.
        """

    def wait_issued(self, timeout_s: float = -1.0) -> bool:
        """As `wait`, but only until every piece stands in the accelerator's stream."""

    def stream_wait(self, stream: int) -> None:
        """Make `stream` wait for the last piece.

        Blocks until every piece is issued. Where nothing in a stream stands for the end of the
        work (host copies, sums, updates), the calling thread waits for it instead.
        """

    def times(self) -> list[tuple[int, int]]:
        """(begin, end) of each piece on the clock of `time.monotonic_ns`; zeros while open.

        A link's piece begins when it is handed to the copy engine: the engine's queue and what it
        waits for are in it.
        """

    def results(self) -> list[float]:
        """One value per span of `Pool.square_sums`; waits for them."""

class Hyper:
    """The numbers of one Adam step, rounded to float32 here at the latest."""

    def __init__(
        self,
        decay_mode: Literal["decoupled", "l2", "none"],
        decay: float,
        one_minus_beta1: float,
        beta2: float,
        one_minus_beta2: float,
        eps: float,
        bias_correction2_sqrt: float,
        step_size: float,
    ) -> None: ...
    @property
    def decay_mode(self) -> Literal["decoupled", "l2", "none"]: ...
    @property
    def decay(self) -> float: ...
    @property
    def one_minus_beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def one_minus_beta2(self) -> float: ...
    @property
    def eps(self) -> float: ...
    @property
    def bias_correction2_sqrt(self) -> float: ...
    @property
    def step_size(self) -> float: ...

class PartState:
    """Base addresses of one part; every role has the same element offsets.

    `out` 0 writes no weight; `out == grad` writes it over the gradient, each piece from its own
    first byte. In the split layout `master` holds the bf16 weights and `out` is 0.
    """

    def __init__(
        self,
        grad: int,
        grad_dtype: _DType,
        master_layout: Literal["whole", "split"],
        master: int,
        low: int,
        exp_avg: int,
        exp_avg_sq: int,
        out: int,
        out_dtype: _DType,
        segments: Sequence[tuple[int, int]],
        elements: int,
    ) -> None: ...
    @property
    def grad(self) -> int: ...
    @property
    def master(self) -> int: ...
    @property
    def low(self) -> int: ...
    @property
    def exp_avg(self) -> int: ...
    @property
    def exp_avg_sq(self) -> int: ...
    @property
    def out(self) -> int: ...
    @property
    def elements(self) -> int: ...

SUM_ELEMENTS: int

class Pool:
    """Worker threads, bound to `cpus` as well as the system allows; see `pinning_error`."""

    def __init__(self, threads: int, cpus: Sequence[int] = ...) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def pinning_error(self) -> str: ...
    @property
    def kernel_level(self) -> str: ...
    def update(
        self,
        part: PartState,
        hypers: Sequence[Hyper],
        hyper_of_segment: Sequence[int],
        scale: float,
        piece_elements: int,
        grads: Sequence[int] | None = None,
        after: Sequence[Ticket] = ...,
        sums: int = 0,
        names: Sequence[str] = ...,
        source: tuple[int, int, int, int] = ...,
    ) -> Ticket:
        """One Adam step over the present segments (hyper -1: absent); pieces of the part.

        `source` has the addresses of master, low (0 if whole), exp_avg and exp_avg_sq that are read
        instead of the part's own, which are written alone; zeros update in place.

        `sums` is the address of three uint32 for every `SUM_ELEMENTS` elements, the CRC-32C of what
        master (high, low), exp_avg and exp_avg_sq hold there. A block that differs fails the update
        before a bit of it changes and names its segments by `names`; new sums replace the old.
        """

    def fold(
        self,
        spans: Sequence[tuple[int, int, int]],
        src_dtype: _DType,
        first: bool,
        after: Sequence[Ticket] = ...,
    ) -> Ticket:
        """Set (first) or add (accumulator, source, elements) spans; accumulators are fp32."""

    def square_sums(
        self,
        spans: Sequence[tuple[int, int]],
        dtype: _DType,
        after: Sequence[Ticket] = ...,
    ) -> Ticket:
        """Sum the squares of (address, elements) spans in fp64, by one fixed tree each."""

    def checksums(
        self,
        action: Literal["store", "compare"],
        address: int,
        nbytes: int,
        block_bytes: int,
        sums: int,
        names: Sequence[str] = ...,
        after: Sequence[Ticket] = ...,
    ) -> Ticket:
        """CRC-32C of every block of some bytes: write them at `sums`, or compare with those.

        A difference fails the ticket; its text has what `names` says of the block.
        """

    def close(self) -> None:
        """Join the workers and fail what is left. Idempotent."""

class CopyEngine:
    """An accelerator's copy functions; base of the engines below."""

    def register_host(self, addr: int, bytes: int) -> None:  # noqa: A002
        """Page-lock host memory; a no-op for host copies.

        Raises:
            RuntimeError: With the driver's error name.
        """

    def unregister_host(self, addr: int) -> None: ...

class MemcpyEngine(CopyEngine):
    def __init__(self) -> None: ...

class CudaEngine(CopyEngine):
    """Copies through the CUDA driver, which is looked for at run time.

    Raises:
        RuntimeError: There is no driver or no such device.
    """

    def __init__(self, device: int = 0) -> None: ...

class ScriptedEngine(CopyEngine):
    """Tests: delays pieces at random, reorders those in flight, fails the n-th one."""

    def __init__(
        self,
        inner: CopyEngine,
        seed: int,
        max_delay_us: int,
        fail_at: int = -1,
        fail_text: str = "scripted failure",
    ) -> None: ...

class CopyPlan:
    """Which bytes go where, in pieces; may be used for any number of copies."""

    def __init__(self, piece_bytes: int) -> None: ...
    def append(self, dst: int, src: int, nbytes: int) -> None:
        """Pack a copy behind the last one, splitting it where a piece is full."""

    def add(self, piece_index: int, dst: int, src: int, nbytes: int) -> None:
        """Place a copy in a piece, whatever its size."""

    @property
    def pieces(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class StagingRing:
    """Equal slots of host memory that sums pass through; links may share one."""

    def __init__(self, addr: int, slot_bytes: int, slots: int) -> None: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def slots_free(self) -> int: ...

class Link:
    """One direction of data movement: a native thread that paces pieces by priority."""

    def __init__(
        self,
        engine: CopyEngine,
        streams: Sequence[int] = (0,),
        max_in_flight: int = 2,
        shuffle_seed: int = -1,
        name: str = "link",
        awaits_events: bool = False,
    ) -> None: ...
    def copy(
        self,
        plan: CopyPlan,
        priority: int = 0,
        after: Sequence[Ticket] = ...,
        piecewise: Ticket | None = None,
        event: int = 0,
    ) -> Ticket:
        """Copy a plan; piece i waits for piece i of `piecewise` as well as for `after`."""

    def copy_fold(
        self,
        pool: Pool,
        spans: Sequence[tuple[int, int, int]],
        src_dtype: _DType,
        first: bool,
        ring: StagingRing,
        priority: int = 0,
        after: Sequence[Ticket] = ...,
        event: int = 0,
    ) -> Ticket:
        """Bring (accumulator, source, elements) spans through `ring` and fold them there."""

    def close(self) -> None:
        """End pieces in flight, join the thread and fail what is left. Idempotent."""

class FileBackend:
    """How blocks reach the kernel; base of the backends below. One backend serves one queue."""

class ThreadBackend(FileBackend):
    """One thread per block in flight."""

    def __init__(self, threads: int) -> None: ...

class UringBackend(FileBackend):
    """io_uring by system calls.

    Raises:
        RuntimeError: The kernel has none or forbids it, with its reason.
    """

    def __init__(self, depth: int) -> None: ...

class ScriptedBackend(FileBackend):
    """Tests: late and reordered completions; the n-th block fails, or transfers only a part."""

    def __init__(
        self,
        inner: FileBackend,
        seed: int = 0,
        max_delay_us: int = 0,
        fail_at: int = -1,
        fail_errno: int = 5,
        short_at: int = -1,
        short_bytes: int = 0,
    ) -> None: ...

class FileSet:
    """Files as one striped space; keeps descriptors of its own."""

    def __init__(self, descriptors: list[int], names: list[str], stripe_bytes: int) -> None: ...
    @property
    def files(self) -> int: ...

class FileQueue:
    """Reads and writes by a native thread, with `depth` blocks of `block_bytes` in flight.

    Offsets, addresses and lengths of the (offset, address, bytes) spans are multiples of 4096.
    An error or an early end of a file fails the ticket and names bytes, place and errno.
    """

    def __init__(
        self,
        backend: FileBackend,
        depth: int = 8,
        block_bytes: int = ...,
        single_submit: bool = False,
        overlap_events: bool = True,
        name: str = "files",
    ) -> None: ...
    def read(
        self,
        files: FileSet,
        spans: Sequence[tuple[int, int, int]],
        priority: int = 0,
        after: Sequence[Ticket] = ...,
        piecewise: Ticket | None = None,
    ) -> Ticket:
        """Fill memory from a set; a piece for each span."""

    def write(
        self,
        files: FileSet,
        spans: Sequence[tuple[int, int, int]],
        priority: int = 0,
        after: Sequence[Ticket] = ...,
        piecewise: Ticket | None = None,
    ) -> Ticket:
        """Write memory to a set; a piece for each span."""

    def cancel(self, ticket: Ticket) -> None:
        """Drop what is not under way; the ticket fails."""

    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    def close(self) -> None:
        """End blocks in flight, join the thread and fail what is left. Idempotent."""
