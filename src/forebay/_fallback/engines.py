"""Copy engines that have copied when they return."""

# The signatures are the native core's.
# ruff: noqa: A002, ARG002

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CopyEngine", "CudaEngine", "MemcpyEngine", "ScriptedEngine"]

# CU_MEMHOSTREGISTER_PORTABLE: page-locked for every context of the process.
_PORTABLE = 1


class CopyEngine:
    """Base of the engines: copies pieces, page-locks host memory."""

    def copy(self, spans: Sequence[tuple[int, int, int]], *, event: int) -> None:
        """Copy (destination, source, bytes) spans after `event` has been reached."""
        raise NotImplementedError

    def register_host(self, addr: int, bytes: int) -> None:
        """Page-lock host memory where that has a meaning."""

    def unregister_host(self, addr: int) -> None:
        """Undo `register_host`."""


class MemcpyEngine(CopyEngine):
    """Host to host."""

    def copy(self, spans: Sequence[tuple[int, int, int]], *, event: int) -> None:
        """Copy at once; there are no events on the host."""
        for destination, source, nbytes in spans:
            ctypes.memmove(destination, source, nbytes)


class CudaEngine(CopyEngine):
    """The CUDA driver through ctypes, one synchronous copy at a time.

    Raises:
        RuntimeError: There is no driver or no such device.
    """

    def __init__(self, device: int = 0) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RuntimeError(
                f"the CUDA driver is not available: {error}\n"
                "hint: install the NVIDIA driver, or use the cpu accelerator"
            ) from error
        handle = ctypes.c_int()
        self._context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)

    def copy(self, spans: Sequence[tuple[int, int, int]], *, event: int) -> None:
        """Wait for the event, copy, and wait until the device has the bytes."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            if event:
                self._call("cuEventSynchronize", ctypes.c_void_p(event))
            for destination, source, nbytes in spans:
                self._call(
                    "cuMemcpy",
                    ctypes.c_uint64(destination),
                    ctypes.c_uint64(source),
                    ctypes.c_size_t(nbytes),
                )
            # A copy from pageable memory returns when it has been staged, not when it is there.
            self._call("cuCtxSynchronize")
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def register_host(self, addr: int, bytes: int) -> None:
        """Page-lock host memory for every context."""
        self._in_context(
            "cuMemHostRegister_v2", ctypes.c_void_p(addr), ctypes.c_size_t(bytes), _PORTABLE
        )

    def unregister_host(self, addr: int) -> None:
        """Undo `register_host`."""
        self._in_context("cuMemHostUnregister", ctypes.c_void_p(addr))

    def _in_context(self, name: str, *arguments: object) -> None:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self._driver, name)(*arguments)
        if error:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(error, ctypes.byref(text))
            known = text.value.decode() if text.value else f"CUDA error {error}"
            raise RuntimeError(f"{known} from {name.removesuffix('_v2')}")


class ScriptedEngine(CopyEngine):
    """Fails the n-th piece; delays mean nothing where every copy is waited for."""

    def __init__(
        self,
        inner: CopyEngine,
        seed: int,
        max_delay_us: int,
        fail_at: int = -1,
        fail_text: str = "scripted failure",
    ) -> None:
        self._inner = inner
        self._fail_at = fail_at
        self._fail_text = fail_text
        self._num_pieces = 0

    def copy(self, spans: Sequence[tuple[int, int, int]], *, event: int) -> None:
        """Copy, or fail by the script."""
        fails = self._num_pieces == self._fail_at
        self._num_pieces += 1
        if fails:
            raise RuntimeError(self._fail_text)
        self._inner.copy(spans, event=event)

    def register_host(self, addr: int, bytes: int) -> None:
        """As the inner engine does."""
        self._inner.register_host(addr, bytes)

    def unregister_host(self, addr: int) -> None:
        """As the inner engine does."""
        self._inner.unregister_host(addr)
