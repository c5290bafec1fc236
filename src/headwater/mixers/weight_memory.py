"""Memory of weights: slabs with huge pages, and weights that several processes of one host hold only once.

A processor keeps the addresses of few pages at hand, and prefetches no further than a page. At one thread, a row and a
weight of 1,024 x 3,584 in bfloat16 are multiplied in 282 us from pages of 2 MB, and in 317 us from pages of 4 KB.

The workers of a cluster load the same model. The first process writes a weight, as it is laid out for products, to
memory of its own that others can map (`memfd`). A file for each weight, named by the digest of its content, lists the
processes that have it. The next process that loads the same weight compares its own with theirs, byte by byte, maps
theirs and drops its own. So only the bytes are trusted, and the memory is freed when the last process ends, however it
ends. A page that a process writes to becomes its own (a private mapping). Only Linux has such memory.
"""

from __future__ import annotations

import fcntl
import logging
import math
import mmap
import os
import resource
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from blake3 import blake3

from headwater.cache_folder import own_folder

NAME = "headwater-weights"
BOOT = Path("/proc/sys/kernel/random/boot_id")
MIN_SHARED_BYTES = 2**16  # of a weight: a mapping takes whole pages
MAX_FOLDER_AGE = 30 * 86400.0  # seconds since its last change
BYTES_PER_WRITE = 2**30  # by one call
HUGE_PAGE = 2**21  # bytes
SLAB_BYTES = 2**26  # a larger tensor has a slab of its own size
CACHE_LINE = 64  # bytes; a tensor begins at a whole one

log = logging.getLogger("headwater.models")

Holder = tuple[int, int]  # a process, and the number of an open file of its


class Slabs:
    """Private mappings from which tensors are cut, one after the other. A slab is freed with the last of its tensors.

    Resident memory grows as tensors are written, by a huge page at a time. If the system has no huge pages, or ignores
    advice about them, slabs are plain memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slab: weakref.ref[mmap.mmap] | None = None  # the latest one, for as long as a tensor in it lives
        self._used = 0  # bytes of it

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros that takes no memory until it is written."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        size = -(-count * dtype.itemsize // CACHE_LINE) * CACHE_LINE
        with self._lock:
            slab = self._slab() if self._slab else None
            if slab is None or self._used + size > len(slab):
                slab = self._new(size)
            first, self._used = self._used, self._used + size
            return torch.frombuffer(slab, dtype=dtype, count=count, offset=first).view(shape)

    def _new(self, min_bytes: int) -> mmap.mmap:
        """Map a slab of at least `min_bytes` after its first whole huge page, where tensors begin."""
        size = -(-max(min_bytes, SLAB_BYTES) // HUGE_PAGE) * HUGE_PAGE
        # and one huge page more, since a mapping may begin anywhere
        slab = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = torch.frombuffer(slab, dtype=torch.uint8).data_ptr()
        self._slab, self._used = weakref.ref(slab), -address % HUGE_PAGE
        advise(slab)
        return slab


def advise(memory: mmap.mmap) -> None:
    """Advise the system to back a mapping with huge pages, if it has them."""
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)


class SharedWeights:
    """Weights that this process shares with others of this user and host, listed in files in `folder`.

    A process that has mapped a weight is also listed in its file: others find it there when the first one has ended.
    """

    def __init__(self, folder: Path) -> None:
        """Forget the weights that no process has any more. Raises OSError if the folder cannot be written."""
        self._folder = folder
        self._files: dict[Holder, int] = {}  # memory of others by its holder, open here
        self._own: int | None = None
        self._end = 0  # of its written part
        for path in folder.iterdir():
            with _locked(path) as file:
                if not any(_is_open(holder) for holder, _ in _entries(file)):
                    path.unlink(missing_ok=True)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the same bits in memory that processes share. Raises OSError without memory for it."""
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        digest = blake3(content.numpy().data, max_threads=blake3.AUTO).hexdigest()
        with _locked(self._folder / digest) as file:
            for holder, offset in _entries(file):
                found = self._open(holder)
                mapped = None if found is None else _mapped(found, offset, len(content))
                if found is not None and mapped is not None and torch.equal(mapped, content):
                    break
            else:
                found, offset = self._write(content)
                mapped = _mapped(found, offset, len(content))
                assert mapped is not None
                os.ftruncate(file, 0)  # holders that were there have ended
            os.lseek(file, 0, os.SEEK_END)
            os.write(file, f"{os.getpid()} {found} {offset}\n".encode())
        return mapped.view(tensor.dtype).view(tensor.shape)

    def _open(self, holder: Holder) -> int | None:
        """Return this process's number of a file that a holder has open, None if that has ended."""
        if holder not in self._files and _is_open(holder):
            with suppress(OSError):
                self._files[holder] = os.open(_path(holder), os.O_RDONLY | os.O_CLOEXEC)
        return self._files.get(holder)

    def _write(self, content: torch.Tensor) -> tuple[int, int]:
        """Add content to this process's memory; return its file and where it begins there."""
        if self._own is None:
            self._own = os.memfd_create(NAME, os.MFD_CLOEXEC)
        grain = HUGE_PAGE if len(content) >= HUGE_PAGE else mmap.PAGESIZE  # skipped bytes take no memory
        offset = -(-self._end // grain) * grain
        left, at = content.numpy().data, offset
        os.ftruncate(self._own, offset + len(content))
        while left:
            n = os.pwrite(self._own, left[:BYTES_PER_WRITE], at)
            left, at = left[n:], at + n
        self._end = at
        return self._own, offset


def _entries(file: int) -> list[tuple[Holder, int]]:
    """Return the holders that a weight's file names, and where the weight begins in each one's memory."""
    os.lseek(file, 0, os.SEEK_SET)
    found = []
    for line in os.read(file, 2**20).decode(errors="replace").splitlines():
        words = line.split()
        if len(words) == 3 and all(word.isdecimal() for word in words):
            process, number, offset = map(int, words)
            found.append(((process, number), offset))
    return found


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open a weight's file; processes that load the same weight at once wait for each other."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:  # else another process removed it meanwhile
                yield file
                return
        finally:
            os.close(file)


def _path(holder: Holder) -> str:
    return f"/proc/{holder[0]}/fd/{holder[1]}"


def _is_open(holder: Holder) -> bool:
    """Return whether a process lives and has this file open: numbers of ended processes are used again."""
    try:
        return os.readlink(_path(holder)).startswith(f"/memfd:{NAME}")
    except OSError:
        return False


def _mapped(file: int, offset: int, size: int) -> torch.Tensor | None:
    """Map bytes of a file, which stay mapped as long as the tensor lives; None if the file is shorter."""
    if offset % mmap.PAGESIZE or os.fstat(file).st_size < offset + size:
        return None
    memory = mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
    advise(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)


_shared: SharedWeights | None = None
_loading = False


def share(folder: Path | None = None) -> None:
    """Share the weights of all models that this process loads from now on; if it cannot, log why.

    `folder`: the same for all processes that share; None: one in the cache folder, of this start of this host, since
    a folder may be that of several hosts, and numbers of processes are of one. A shared weight takes an open file.
    """
    global _shared
    if not hasattr(os, "memfd_create"):
        return
    with _or_private():
        _shared = SharedWeights(folder or _folder_of_host())
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _folder_of_host() -> Path:
    """Make the folder of this start of this host; remove those of others that are old. Raises OSError."""
    folder = own_folder("shared-weights", BOOT.read_text().strip())
    for other in folder.parent.iterdir():
        if other != folder and time.time() - other.stat().st_mtime > MAX_FOLDER_AGE:
            shutil.rmtree(other, ignore_errors=True)
    return folder


@contextmanager
def _or_private() -> Iterator[None]:
    """Stop sharing after an error of the system."""
    global _shared
    try:
        yield
    except OSError as error:
        _shared = None
        log.warning("weights are not shared with other workers of this host: %s", error)


@contextmanager
def of_a_model() -> Iterator[None]:
    """Mark weights that are laid out meanwhile as a model's, which may be shared; others are private."""
    global _loading
    before, _loading = _loading, True
    try:
        yield
    finally:
        _loading = before


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return a weight of a model in shared memory, if this process shares weights and the weight is not small."""
    shared = _shared if _loading else None
    if shared is None or tensor.device.type != "cpu" or tensor.numel() * tensor.element_size() < MIN_SHARED_BYTES:
        return tensor
    with _or_private():
        return shared.keep(tensor)
    return tensor
