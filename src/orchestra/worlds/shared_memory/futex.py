# SPDX-License-Identifier: Apache-2.0
"""Words in shared memory on which processes wait in the kernel (Linux futexes).

A word is a 32-bit number with one writer at a time. Writing it and waking all waiters takes one system call; the kernel
compares the value before it puts a waiter to sleep, so no wake-up is lost.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import threading

from orchestra.errors import EnvironmentProblem

# Only architectures on which stores become visible in order: there are no other memory barriers here.
_SYSCALL = {"x86_64": 202}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class FutexWords:
    """`count` futex words at the start of a shared mapping."""

    def __init__(self, memory: mmap.mmap, count: int) -> None:
        if _SYSCALL is None:
            raise EnvironmentProblem(
                f"Local runs need Linux on x86_64, this is {platform.system()} on {platform.machine()}."
            )
        self._values = memoryview(memory)[: 4 * count].cast("I")
        self._anchor = (ctypes.c_uint32 * count).from_buffer(memory)
        self._base = ctypes.addressof(self._anchor)
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.argtypes = [
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint32,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint32,
        ]
        self._fence = threading.Lock()

    def __getitem__(self, index: int) -> int:
        return self._values[index]

    def set(self, index: int, value: int) -> None:
        """Write without waking waiters; the write is visible before the next read of this process."""
        self._values[index] = value
        # The store may stay in this core's buffer during the next load: taking a lock is a full fence.
        with self._fence:
            pass

    def announce(self, index: int, value: int) -> None:
        """Write and wake all that wait on this word."""
        self._values[index] = value
        self._syscall(_SYSCALL, self._base + 4 * index, _WAKE, _ALL, None, None, 0)

    def wait(self, index: int, seen: int, seconds: float) -> None:
        """Sleep until the word differs from `seen`, or for `seconds`; may also return spuriously."""
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        failed = self._syscall(_SYSCALL, self._base + 4 * index, _WAIT, seen, ctypes.addressof(limit), None, 0)
        if failed and ctypes.get_errno() not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def close(self) -> None:
        """Release the mapping."""
        self._values.release()
        del self._anchor
