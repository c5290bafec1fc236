"""Buffers in shared memory, through which a worker gets parts from another one of its host.

The worker that pulls makes the memory (`memfd`) and names it in its question: a process, and the number of an open file
there. The worker that has the part opens it through /proc, which the kernel allows to processes of the same user, and
writes the part into it. The reader copies it into pages of its own before it checks the digest: what anyone writes to
the buffer afterwards changes nothing.

Only Linux has such memory. Two containers with separate process numbers count as two hosts.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from headwater.tiers.part import Buffer

NAME = "headwater-part"
BOOT = Path("/proc/sys/kernel/random/boot_id")
SEALS = 0 if not hasattr(fcntl, "F_SEAL_GROW") else fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL

log = logging.getLogger("headwater.cluster")


class NotShared(Exception):
    """A buffer cannot be written from this process."""


class BufferPlace(msgspec.Struct, array_like=True, frozen=True):
    """A buffer, as the process that owns it names it to others of its host."""

    host: str
    process: int
    file: int
    inode: int  # a number of a process or of a file may be another one's by now
    size: int  # bytes


@cache
def this_host() -> str:
    """Return an id that processes share which can open each other's memory; "" if this system cannot share it."""
    if not SEALS or not hasattr(os, "memfd_create"):
        return ""
    with suppress(OSError):
        return f"{BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


class SharedBuffer:
    """Memory of a fixed size, which others of this host may write to."""

    def __init__(self, size: int) -> None:
        """Allocate `size` bytes. Raises OSError if that fails."""
        file = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
            self._memory = memoryview(mmap.mmap(file, size, prot=mmap.PROT_READ))
            self.place = BufferPlace(this_host(), os.getpid(), file, os.fstat(file).st_ino, size)
        except BaseException:
            os.close(file)
            raise

    def read(self, size: int) -> memoryview:
        """Return its first `size` bytes, which others may still change."""
        return self._memory[:size]

    def close(self) -> None:
        """Close the buffer to other processes. Its memory is freed with its last reader."""
        os.close(self.place.file)
        self._memory = memoryview(b"")


class SharedBuffers:
    """Pool of unused buffers: writes to new memory take three times as long."""

    def __init__(self) -> None:
        self._free: list[SharedBuffer] | None = []  # None: closed
        self._failed = False  # once

    def take(self, size: int) -> SharedBuffer | None:
        """Return a buffer of at least `size` bytes; None if it cannot be allocated."""
        try:
            found = self._free.pop() if self._free else None
        except IndexError:  # another thread took it
            found = None
        if found is not None and found.place.size >= size:
            return found
        if found is not None:
            found.close()
        try:
            return SharedBuffer(size)
        except OSError as error:
            level, self._failed = logging.DEBUG if self._failed else logging.WARNING, True
            log.log(
                level, "parts come over the network: a buffer of %s bytes cannot be allocated: %s", f"{size:,}", error
            )
            return None

    def give(self, buffer: SharedBuffer) -> None:
        """Keep a buffer for other reads."""
        if self._free is None:
            buffer.close()
        else:
            self._free.append(buffer)

    def close(self) -> None:
        """Close the buffers that are free, and others when they are given."""
        free, self._free = self._free or [], None
        for buffer in free:
            buffer.close()


def fill(place: BufferPlace, pieces: Sequence[Buffer]) -> int:
    """Write pieces, one after the other, to another process's buffer; return their bytes. Raises NotShared."""
    size = sum(map(len, pieces))
    if place.host != this_host():
        raise NotShared("it is on another host or in another container")
    try:
        file = _opened(place, size)
        try:
            at = 0
            for piece in pieces:
                left = memoryview(piece)
                while left:
                    n = os.pwrite(file, left, at)
                    left, at = left[n:], at + n
        finally:
            os.close(file)
    except OSError as error:
        raise NotShared(f"its memory cannot be written: {error}") from error
    return size


def _opened(place: BufferPlace, size: int) -> int:
    """Open a buffer of at least `size` bytes, and nothing else. Raises NotShared or OSError."""
    path = f"/proc/{place.process}/fd/{place.file}"
    if not os.readlink(path).startswith(f"/memfd:{NAME}"):
        raise NotShared("it named a file that is not a buffer")
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(file)
        if found.st_ino != place.inode or fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise NotShared("it named a file that is not a buffer")
        if found.st_size < size:
            raise NotShared(f"its buffer has {found.st_size:,} bytes, the part has {size:,}")
    except BaseException:
        os.close(file)
        raise
    return file
