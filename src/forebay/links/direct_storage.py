"""GPUDirect Storage through KvikIO: files read into device memory, past the host's.

Whether a machine has it is asked of cuFile itself: without NVIDIA's driver nvidia-fs the library
reads through host memory and says nothing. What comes this way is not compared with its checksum.
"""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DirectFile", "DirectStorage", "find_direct_storage"]

_NOT_INSTALLED = "KvikIO is not installed (pip install forebay[gds])"


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectStorage:
    """Whether files can be read into device memory directly.

    Attributes:
        library: KvikIO; None where they are read through host memory.
        reason: Why, in a clause.
    """

    library: Any
    reason: str

    def open(self, descriptor: int) -> DirectFile:
        """Open a file once more; the descriptor may be closed then."""
        return DirectFile(self.library.CuFile(f"/proc/self/fd/{descriptor}", "r"))


class DirectFile:
    """One file that is read into device memory.

    Args:
        file: KvikIO's.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._closed = False

    def read(self, target: torch.Tensor, *, offset: int) -> None:
        """Fill a contiguous tensor; blocks.

        Args:
            target: On the device, of any dtype.
            offset: Of its first byte in the file.

        Raises:
            RuntimeError: Fewer bytes came, or the file is closed.
        """
        flat = target.reshape(-1).view(torch.uint8)
        with self._lock:
            if self._closed:
                raise RuntimeError("the file was closed before this read was done")
            came = int(self._file.pread(flat, size=flat.numel(), file_offset=offset).get())
        if came != flat.numel():
            raise RuntimeError(
                f"reading {flat.numel()} bytes at offset {offset} through KvikIO: {came} came"
            )

    def close(self) -> None:
        """Return once nothing is read any more, and let go of the file. Idempotent."""
        with self._lock:
            self._closed = True
            self._file.close()


def find_direct_storage(
    device: torch.device, *, load: Callable[[str], Any] = importlib.import_module
) -> DirectStorage:
    """Ask the machine.

    Args:
        device: Where weights are to go.
        load: Imports a module; raises ImportError where there is none.
    """

    def _through_host(reason: str) -> DirectStorage:
        return DirectStorage(library=None, reason=reason)

    if device.type != "cuda":
        return _through_host("the device is no GPU")
    try:
        library = load("kvikio")
        driver = load("kvikio.cufile_driver")
    except ImportError:
        return _through_host(_NOT_INSTALLED)
    try:
        is_there = bool(driver.get("is_gds_available"))
    except AttributeError:
        return _through_host("this KvikIO does not say whether it can (25.4 and later do)")
    except (RuntimeError, OSError) as error:
        return _through_host(f"cuFile cannot be used: {str(error).splitlines()[0]}")
    if not is_there:
        return _through_host("cuFile finds no driver nvidia-fs, and would read through host memory")
    return DirectStorage(library=library, reason="cuFile has its driver")
