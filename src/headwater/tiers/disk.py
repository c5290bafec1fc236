"""Disk store: one file for each part, named by its digest, and no other data such as a journal.

A file is written under another name and renamed, so that it is whole or missing. Servers may share a folder: each sees
the other's files, and one at a time evicts. Files may be torn after a loss of power, which is found when they are read.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from headwater.tiers.catalog import Catalog, Entry
from headwater.tiers.changes import IGNORED, PartsRemoved, StoreChanges
from headwater.tiers.part import HEADER, Buffer, Header
from headwater.tiers.store import StoreError, StoreFull, Usage

UNFINISHED_SUFFIX = ".tmp-"
UNFINISHED_SECONDS = 3600.0  # after which the writer of a file is assumed to have ended
FREED_SHARE = 0.05  # of the limit; an eviction frees at least as much, so that evictions are rare
MAX_PIECES_PER_CALL = 512  # of `writev` and `readv`

log = logging.getLogger("headwater.tiers")


class DiskStore:
    """Parts in files of `folder`, in 256 folders below it, at most `limit` bytes."""

    kind, medium = "disk", "STORAGE"

    def __init__(self, folder: Path, limit: int | None, clock: Callable[[], float] = time.time) -> None:
        """Raises StoreError if the folder cannot be made or read; one that cannot be written is read."""
        self.folder, self.limit, self.shown = folder, limit, str(folder)
        self._clock = clock
        self.changes: StoreChanges = IGNORED
        self._claim: int | None = None  # handle of the file that servers lock which publish what the folder holds
        self._catalog = Catalog()
        self._evicted = 0
        self._written = 0  # bytes since the folder was listed
        self._changing = threading.Lock()
        with self._errors("cannot be used"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _open_lock(folder)
        self._scan: threading.Thread | None = threading.Thread(target=self._read_names, daemon=True)
        self._scan.start()

    # -- parts

    def has(self, names: Sequence[str]) -> list[bool]:
        return [os.path.exists(self._file(name)) for name in names]

    def get(self, name: str) -> Buffer | None:
        try:
            size = os.stat(self._file(name)).st_size
        except OSError:
            return None
        content = memoryview(bytearray(size))
        return content if self.read_into(name, [content]) else None

    def read_into(self, name: str, pieces: Sequence[memoryview]) -> bool:
        with self._errors("cannot be read"):
            try:
                file = open_file(self._file(name))
            except FileNotFoundError:
                return False
            with file:
                if os.fstat(file.fileno()).st_size != sum(map(len, pieces)) or not _read(file.fileno(), pieces):
                    return False
            self.touch([name])
            return True

    def put(self, name: str, pieces: Sequence[Buffer], keep: Set[str] = frozenset()) -> None:
        size = sum(map(len, pieces))
        file = self._file(name)
        if os.path.exists(file):
            return
        if self.limit is not None and size > self.limit:
            raise StoreFull(f"{self.shown}: a part of {size:,} bytes, and the limit is {self.limit:,}")
        self._make_room(size, keep)
        with self._errors("cannot be written"):
            os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
            unfinished = os.path.join(os.path.dirname(file), UNFINISHED_SUFFIX + secrets.token_hex(8))
            try:
                handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    _write(handle, pieces)
                    os.utime(handle, (self._clock(),) * 2)
                finally:
                    os.close(handle)
                os.replace(unfinished, file)
            except OSError:
                with suppress(OSError):
                    os.unlink(unfinished)
                raise
        self._wait_for_scan()
        with self._changing:
            self._catalog.add(name, _entry(name, size, self._clock(), b"".join(pieces[:1])))

    def touch(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(OSError):  # it is gone, or the folder is read-only, which serves
                os.utime(self._file(name), (self._clock(),) * 2)

    def delete(self, names: Sequence[str]) -> None:
        self._wait_for_scan()
        with self._errors("cannot be written"), self._changing:
            for name in names:
                self._unlink(name)
                self._catalog.remove(name)
            self.changes.put(PartsRemoved(names))

    def usage(self) -> Usage:
        self._wait_for_scan()
        with self._changing:
            catalog = self._catalog
            return Usage(len(catalog.entries), catalog.bytes, self.limit, self._evicted, dict(catalog.states))

    def catalog(self) -> Catalog:
        self._wait_for_scan()
        with self._errors("cannot be read"), self._changing:
            self._read_names()
            self._read_headers()
            return self._catalog

    def close(self) -> None:
        """Release the folder's lock."""
        self._wait_for_scan()
        os.close(self._lock)
        claim, self._claim = self._claim, None
        if claim is not None:
            os.close(claim)

    # -- whether others have it

    def claim(self) -> None:
        """Lock the folder's file for this, as others may, too; a folder that cannot be written is never private."""
        with suppress(OSError, AttributeError):  # these locks are Linux's
            self._claim = os.open(self.folder / ".claims", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _record_lock(self._claim, fcntl.F_OFD_SETLK, fcntl.F_RDLCK)

    def is_private(self) -> bool:
        if self._claim is None:
            return False
        with suppress(OSError, AttributeError):
            return _record_lock(self._claim, fcntl.F_OFD_GETLK, fcntl.F_WRLCK) == fcntl.F_UNLCK
        return False

    def piece(self, name: str, at: int, size: int) -> bytes:
        with suppress(OSError), open_file(self._file(name)) as file:
            return os.pread(file.fileno(), min(size, os.fstat(file.fileno()).st_size), at)  # whatever a header says
        return b""

    # -- room

    def _make_room(self, size: int, keep: Set[str]) -> None:
        """Evict until `size` more bytes fit. Raises StoreFull."""
        if self.limit is None:
            return
        self._wait_for_scan()
        with self._changing:
            self._written += size
            if self._catalog.bytes + size <= self.limit and self._written <= FREED_SHARE * self.limit:
                return
            self._written = 0  # other servers write, too: the folder is listed again
        with self._errors("cannot be written"), self._alone(), self._changing:
            self._read_names()  # another server may have written, or evicted
            if self._catalog.bytes + size <= self.limit:
                return
            wanted = int(self.limit * (1 - FREED_SHARE)) - size
            self._read_headers()
            for names in self._catalog.evict(max(0, wanted), self._clock(), keep, self._unlink):
                self._evicted += len(names)
                self.changes.put(PartsRemoved(names))
            if self._catalog.bytes + size > self.limit:
                raise StoreFull(f"{self.shown}: {size:,} bytes do not fit in addition to {self._catalog.bytes:,}")

    def _unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._file(name))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other servers from evicting meanwhile."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _read_names(self) -> None:
        """List the folder's files into the catalog, and remove unfinished ones that are an hour old."""
        catalog, now = Catalog(), self._clock()
        try:
            for file in self._files():
                with suppress(FileNotFoundError):
                    found = file.stat()
                    if file.name.startswith(UNFINISHED_SUFFIX):
                        if now - found.st_mtime > UNFINISHED_SECONDS:
                            with suppress(OSError):  # not in a folder that is only read
                                os.unlink(file.path)
                        continue
                    known = self._catalog.entries.get(file.name)
                    entry = Entry(found.st_size, found.st_mtime, -1.0, "")
                    if known is not None and known.bytes == entry.bytes:
                        entry.seconds, entry.below = known.seconds, known.below
                    catalog.add(file.name, entry)
        except OSError as error:
            log.warning("%s cannot be read whole: %s", self.shown, error)
        self._catalog = catalog

    def _read_headers(self) -> None:
        """Read the headers that are not known yet; a file without a valid header is evicted first."""
        for name, entry in list(self._catalog.entries.items()):
            if entry.seconds < 0:
                with suppress(OSError), open_file(self._file(name)) as file:
                    known = _entry(name, entry.bytes, entry.used, file.read(HEADER.size))
                    self._catalog.add(name, known)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self.folder) as folders:
            for folder in folders:
                if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
                    with suppress(FileNotFoundError), os.scandir(folder.path) as files:
                        yield from files

    def _wait_for_scan(self) -> None:
        """Wait for the first listing, which ends with a new catalog, without changes made meanwhile."""
        scan = self._scan
        if scan is not None:
            scan.join()
            self._scan = None

    def _file(self, name: str) -> str:
        return os.path.join(self.folder, name[1:3], name)

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"{self.shown} {what}: {error}") from error


def open_file(path: str) -> FileIO:
    """Open a file for reading. Raises FileNotFoundError for all else: the open of a FIFO would wait for a writer."""
    file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileNotFoundError(f"{path} is not a file")
    return file


def _open_lock(folder: Path) -> int:
    """Return a handle that servers of this folder lock; of the folder itself, if no file can be written to it.

    Raises OSError if the folder can be written, and its lock is another user's: so are its parts, which only that user
    can read, and two locks would let both servers evict at once.
    """
    file = folder / ".lock"
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        if error.errno == errno.EACCES and os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "servers of two users cannot share a folder", str(file)) from error
        return os.open(folder, os.O_RDONLY | os.O_CLOEXEC)


def _record_lock(handle: int, command: int, kind: int) -> int:
    """Lock a file, or ask whether it could be locked; return the kind of lock that is there then. Raises OSError.

    The lock is that of an open file (Linux): it is gone when its process is.
    """
    lock = struct.Struct("@hhqqi")  # kind, from the begin of the file, start, length (0: all), process
    answer = fcntl.fcntl(handle, command, lock.pack(kind, os.SEEK_SET, 0, 0, 0))
    found: int = lock.unpack(answer)[0]
    return found


def _entry(name: str, size: int, used: float, head: bytes) -> Entry:
    """Return what eviction needs to know of a part; of one without a header, that it saves nothing."""
    header = Header.of(head)
    if header is None:
        return Entry(size, used, 0.0, "")
    return Entry(size, used, header.seconds, header.below)


def _write(handle: int, pieces: Sequence[Buffer]) -> None:
    """Write pieces one after the other, however few bytes a call takes."""
    left = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    while left:
        n = os.writev(handle, left[:MAX_PIECES_PER_CALL])
        while left and n >= len(left[0]):
            n -= len(left.pop(0))
        if n:
            left[0] = left[0][n:]


def _read(handle: int, pieces: Sequence[memoryview]) -> bool:
    """Fill pieces one after the other, however few bytes a call gives; False if the file is shorter."""
    left = [piece for piece in pieces if len(piece)]
    while left:
        n = os.readv(handle, left[:MAX_PIECES_PER_CALL])
        if not n:
            return False
        while left and n >= len(left[0]):
            n -= len(left.pop(0))
        if n:
            left[0] = left[0][n:]
    return True
