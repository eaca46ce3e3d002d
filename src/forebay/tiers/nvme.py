"""The NVMe tier: one file without a name on each path, its space reserved at once.

A store hands out ranges of one striped space; what is in them is its users' business. Nothing can
be left behind: a file has no name from the beginning (`O_TMPFILE`, or unlinked when it is made), so
the system frees it when the process ends, however it ends, and no other job can find it. A full
disk shows here, before training, and not hours later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import ForebayWarning, StorageError
from forebay.hardware.reason import reason_of
from forebay.tiers.ledger import Tier
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.tiers.ledger import Ledger, Reservation, Role

__all__ = [
    "ALIGNMENT_BYTES",
    "NvmeBytes",
    "NvmeStore",
    "aligned",
    "missing_folder_hint",
    "prove_folder",
]

# Sector of a 4Kn drive: what O_DIRECT asks of offsets, addresses and lengths at most.
ALIGNMENT_BYTES = 4096

# What a file system answers that has no files without a name.
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}


def aligned(nbytes: int) -> int:
    """Bytes rounded up to whole sectors."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def missing_folder_hint(path: Path) -> str:
    """What to do about a folder that does not exist, however its path came to be.

    Example:
        >>> missing_folder_hint(Path("~/state"))
        'write the whole path: a shell knows what ~ is, a configuration does not'
    """
    if path.parts and path.parts[0].startswith("~"):
        return "write the whole path: a shell knows what ~ is, a configuration does not"
    if path.is_symlink():
        return f"it is a link: mkdir -p {path.parent / path.readlink()}, where it leads"
    return f"mkdir -p {path}, on a local drive"


def prove_folder(path: Path, *, nbytes: int) -> None:
    """Make a file without a name, of a size, and let go of it: nothing is reserved, nothing stays.

    Args:
        path: A folder.
        nbytes: What the file takes there at least.

    Raises:
        StorageError: The folder is missing or cannot be written, or has no room.
    """
    descriptor, _ = _open(path)
    try:
        _require_room(descriptor, path, nbytes)
        # Bounds on the size of one file: the user's limit, or the file system's.
        os.ftruncate(descriptor, nbytes)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise _cannot(f"make a file of {format_bytes(nbytes)} in", path, error) from error
    finally:
        os.close(descriptor)


class NvmeStore:
    """Reserved space on one or several paths.

    Args:
        paths: Folders; several are one striped space.
        nbytes: How much is needed in all.
        stripe_bytes: Length of a stripe, a multiple of `ALIGNMENT_BYTES`.
        core: The native core or its fallback.
        also_open: Called with each file's descriptor, which it may use meanwhile; what it returns
            is kept in `also_opened`.

    Attributes:
        files: The native set of the files.
        nbytes: Bytes of the space, a multiple of `ALIGNMENT_BYTES`.
        is_direct: Whether every file is read and written past the page cache.

    Raises:
        StorageError: A folder is missing or cannot be written, or has no room.

    Example:
        >>> from pathlib import Path
        >>> from forebay import native
        >>> store = NvmeStore([Path("/tmp")], nbytes=10_000, stripe_bytes=1 << 20,
        ...                   core=native.core())
        >>> store.take(100), store.take(5000)
        (0, 4096)
        >>> store.close()
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        nbytes: int,
        stripe_bytes: int,
        core: Any,
        also_open: Callable[[int], Any] | None = None,
    ) -> None:
        if not paths:
            raise StorageError(
                "no folder is given for state on NVMe",
                hint="set zero_optimization.offload_optimizer.nvme_path",
            )
        self.paths = tuple(paths)
        self.nbytes = aligned(nbytes)
        shares = _shares(self.nbytes, stripe_bytes=stripe_bytes, files=len(paths))
        self._taken = 0
        self._closed = False
        descriptors: list[int] = []
        self.is_direct = True
        try:
            for path, share in zip(paths, shares, strict=True):
                descriptor, direct = _open(path)
                descriptors.append(descriptor)
                self.is_direct = self.is_direct and direct
                _reserve(descriptor, path, share)
            self.files = _file_set(core, descriptors, paths, stripe_bytes)
            self.also_opened = [] if also_open is None else [also_open(one) for one in descriptors]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if not self.is_direct:
            warnings.warn(
                f"the file system of {paths[0]} has no direct access: state goes through the page "
                "cache, which takes host memory that no budget counts\n"
                "hint: use a folder on a local drive (forebay probe nvme PATH measures it)",
                ForebayWarning,
                stacklevel=2,
            )

    def take(self, nbytes: int) -> int:
        """The offset of the next `nbytes`, a multiple of `ALIGNMENT_BYTES`.

        Raises:
            AssertionError: More is taken than was asked for: forebay's own arithmetic is wrong.
        """
        offset, self._taken = self._taken, self._taken + aligned(nbytes)
        if self._taken > self.nbytes:
            raise AssertionError(f"{self._taken} bytes are taken of {self.nbytes} reserved ones")
        return offset

    def close(self) -> None:
        """Let go of the files: the system frees them once nothing is under way. Idempotent."""
        self.files = None


class NvmeBytes:
    """Bytes of the NVMe tier in the ledger, given back when the owner is closed or dies.

    Args:
        ledger: Where they are counted.
        sizes: Bytes by role.
        what: A short noun phrase for messages.
    """

    def __init__(self, ledger: Ledger, sizes: dict[Role, int], *, what: str) -> None:
        self._held: list[Reservation] = []
        try:
            for role, nbytes in sizes.items():
                self._held.append(ledger.reserve(Tier.NVME, role, nbytes, what=what))
        except BaseException:
            self.release()
            raise
        weakref.finalize(self, _release_all, self._held).atexit = False

    def release(self) -> None:
        """Give the bytes back; idempotent."""
        _release_all(self._held)


def _shares(nbytes: int, *, stripe_bytes: int, files: int) -> list[int]:
    """Bytes of a space in each of its files; stripe i lies in file i % files."""
    if files == 1:
        return [nbytes]
    stripes, rest = divmod(nbytes, stripe_bytes)
    rows, over = divmod(stripes, files)
    shares = [(rows + (file < over)) * stripe_bytes for file in range(files)]
    shares[over] += rest
    return shares


def _release_all(held: list[Reservation]) -> None:
    while held:
        held.pop().release()


def _open(path: Path) -> tuple[int, bool]:
    """A new file without a name, mode 0600, and whether it goes past the page cache."""
    try:
        found = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError as error:
        raise StorageError(
            f"the folder {path} for state on NVMe does not exist",
            hint=missing_folder_hint(path),
        ) from error
    except OSError as error:
        raise _cannot("make a state file in", path, error) from error
    if not found:
        raise StorageError(f"{path} is no folder, so state cannot be kept there")
    try:
        try:
            return os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600), True
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
        descriptor, name = tempfile.mkstemp(prefix=".forebay-", dir=path)
        Path(name).unlink()
    except OSError as error:
        raise _cannot("make a state file in", path, error) from error
    with contextlib.suppress(OSError):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        return descriptor, True
    return descriptor, False


def _reserve(descriptor: int, path: Path, nbytes: int) -> None:
    """Make sure that the disk has the bytes, and keep them."""
    _require_room(descriptor, path, nbytes)
    if nbytes:
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            raise _cannot(f"reserve {format_bytes(nbytes)} ({nbytes} bytes) in", path, error) from (
                error
            )


def _require_room(descriptor: int, path: Path, nbytes: int) -> None:
    info = os.fstatvfs(descriptor)
    free = info.f_bavail * info.f_frsize
    if free < nbytes:
        raise StorageError(
            f"state takes {format_bytes(nbytes)} in {path}, which has {format_bytes(free)} left",
            hint="make room, add a path to nvme_path, or raise forebay.host_budget",
        )


def _file_set(core: Any, descriptors: list[int], paths: Sequence[Path], stripe_bytes: int) -> Any:
    """The native set, with descriptors of its own."""
    names = [f"the state file in {path}" for path in paths]
    try:
        return core.FileSet(descriptors, names, stripe_bytes)
    except ValueError as error:
        refused = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not str(error).endswith(str(refused.strerror)):
            raise
        raise _cannot("open state files in", paths[0], refused) from error


def _cannot(what: str, path: Path, error: OSError) -> StorageError:
    reason, hint = reason_of(
        error, hint="name a folder on a local drive that this user may write and that has room"
    )
    failure = StorageError(f"cannot {what} {path}: {reason} (errno {error.errno})", hint=hint)
    failure.errno = error.errno
    return failure
