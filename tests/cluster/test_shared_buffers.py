"""Buffers in shared memory: only they are written to, by processes of the same host, and nothing leaks."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from headwater.cluster import peer_memory, shared_buffers
from headwater.cluster import pulling as pulling_module
from headwater.cluster.peer_channel import Channel
from headwater.cluster.peer_memory import PeerMemory
from headwater.cluster.pulling import PartServer
from headwater.cluster.shared_buffers import BufferPlace, NotShared, SharedBuffer, SharedBuffers, fill
from headwater.cluster.sockets import PLAIN, Contact
from headwater.cluster.wire import Peer
from headwater.tiers.names import RUN
from headwater.tiers.part import HEADER, SEAL_BYTES, Part, PartPlace, Prefix, Sealer
from tests.cluster.fake import until

pytestmark = pytest.mark.skipif(not shared_buffers.this_host(), reason="this system has no memory to share")

KEY, PROMPT, HOLDER = bytes(32), b"k" * 64, b"holder"
PAGE, PAGES = 100_000, 3


class SameParts:
    """Parts of one prefix: the content of each page is its number and the part's."""

    def __init__(self, count: int = 4) -> None:
        self.places = [PartPlace(f"{RUN}{n}", RUN, PAGES) for n in range(count)]

    def find(self, namespace: str, key: bytes, tokens: int) -> Prefix:
        return Prefix(namespace, key, tokens, self.places)

    @contextmanager
    def sealed(self, prefix: Prefix, part: int) -> Iterator:
        pages = [bytes([16 * part + page]) * PAGE for page in range(PAGES)]
        yield Sealer(KEY).seal(prefix.places[part].name, Part(RUN, 0, PAGES, prefix.key, pages))


@contextmanager
def pulling(address: str = "", parts: SameParts | None = None) -> Iterator[tuple[PeerMemory, PartServer | None]]:
    """Yield a memory that knows what a holder in this process has, or one at an address."""
    server = None if address else PartServer(parts or SameParts(), HOLDER, "tcp://127.0.0.1:*", PLAIN)
    memory = PeerMemory(b"reader", PLAIN)
    memory.know([Peer(HOLDER, server.contact if server else Contact(address, b""))])
    try:
        if server is not None:
            server.start()
        memory.ask([HOLDER], "", PROMPT, 64)
        yield memory, server
    finally:
        memory.close()
        if server is not None:
            server.close()


def pull(memory: PeerMemory, part: int) -> bytes | None:
    """Return the pages of a part, after its digest was checked."""
    sizes = HEADER.size, len(PROMPT), *[PAGE] * PAGES, SEAL_BYTES
    pieces = [memoryview(bytearray(size)) for size in sizes]
    if not memory.read_into(f"{RUN}{part}", pieces):
        return None
    Sealer(KEY).check(f"{RUN}{part}", pieces[0], pieces[1], pieces[2:-1], pieces[-1])
    return b"".join(pieces[2:-1])


def pages_of(part: int) -> bytes:
    return b"".join(bytes([16 * part + page]) * PAGE for page in range(PAGES))


def named(file: int, process: int | None = None) -> BufferPlace:
    """Return the place of any open file, as a liar would name it."""
    found = os.fstat(file)
    return BufferPlace(shared_buffers.this_host(), process or os.getpid(), file, found.st_ino, found.st_size)


def test_pieces_arrive_one_after_the_other() -> None:
    buffer = SharedBuffer(10)
    assert fill(buffer.place, [b"abc", b"", memoryview(b"defg")]) == 7
    assert buffer.read(7) == b"abcdefg"
    buffer.close()


@pytest.mark.parametrize("named_as", ["file", "weights", "unsealed", "pipe", "small", "inode", "host", "closed"])
def test_nothing_but_a_buffer_of_this_host_is_written_to(tmp_path: Path, named_as: str) -> None:
    content = b"0123456789"
    buffer, reading, writing = SharedBuffer(20), *os.pipe()
    if named_as == "file":
        (tmp_path / "file").write_bytes(content)
        place = named(os.open(tmp_path / "file", os.O_RDWR))
    elif named_as in ("weights", "unsealed"):
        name = shared_buffers.NAME if named_as == "unsealed" else "headwater-weights"
        file = os.memfd_create(name, os.MFD_ALLOW_SEALING)
        os.write(file, content)
        if named_as == "weights":
            shared_buffers.fcntl.fcntl(file, shared_buffers.fcntl.F_ADD_SEALS, shared_buffers.SEALS)
        place = named(file)
    elif named_as == "pipe":
        place = named(writing)
    else:
        changed = {"small": {}, "closed": {}, "inode": {"inode": 1}, "host": {"host": "another"}}[named_as]
        place = msgspec.structs.replace(buffer.place, **changed)
    if named_as == "closed":
        buffer.close()
    with pytest.raises(NotShared):
        fill(place, [b"x" * (21 if named_as == "small" else 5)])
    if named_as in ("file", "weights", "unsealed"):
        assert os.pread(place.file, 100, 0) == content
        os.close(place.file)
    elif named_as != "closed":
        assert buffer.read(20) == bytes(20)
        buffer.close()
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):
        os.read(reading, 1)
    os.close(reading)
    os.close(writing)


def test_the_size_of_a_buffer_is_sealed() -> None:
    buffer = SharedBuffer(5000)
    for size in (1, 10_000):
        with pytest.raises(PermissionError):
            os.ftruncate(buffer.place.file, size)
    buffer.close()


def test_a_buffer_is_used_again_if_it_is_large_enough() -> None:
    buffers = SharedBuffers()
    first = buffers.take(100)
    buffers.give(first)
    assert buffers.take(50) is first
    other = buffers.take(50)
    buffers.give(first)
    larger = buffers.take(200)
    assert (other is first, larger is first, larger.place.size) == (False, False, 200)
    buffers.close()
    for one in (other, larger):
        buffers.give(one)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(one.place.file)


def open_files() -> int:
    gc.collect()  # of tests before: their files may be closed meanwhile
    return len(os.listdir("/proc/self/fd"))


def mapped_buffers() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:headwater-part")


def test_two_hundred_pulls_leave_no_file_and_no_memory() -> None:
    mapped = mapped_buffers()
    with pulling() as (memory, _):
        assert pull(memory, 0) == pages_of(0)
        before = open_files()
        for n in range(200):
            assert pull(memory, n % 4) == pages_of(n % 4)
        assert open_files() <= before
        assert memory.bytes_by_way == (201 * PAGE * PAGES, 0)
    assert mapped_buffers() <= mapped


@pytest.mark.parametrize("why", ["another host", "no permission", "no memory"])
def test_part_that_cannot_be_shared_comes_over_the_network(monkeypatch, caplog, why: str) -> None:
    caplog.set_level(logging.INFO, "headwater.cluster")

    def denied(*_: object) -> int:
        raise PermissionError("of the test")

    with pulling() as (memory, _):
        if why == "another host":
            here = shared_buffers.this_host()
            monkeypatch.setattr(shared_buffers, "this_host", lambda: f"not {here}")
            monkeypatch.setattr(SharedBuffer, "__init__", in_a_host(here, SharedBuffer.__init__))
        elif why == "no permission":
            monkeypatch.setattr(shared_buffers, "_opened", denied)
        else:
            monkeypatch.setattr(os, "memfd_create", denied)
        assert [pull(memory, part) for part in range(4)] == [pages_of(part) for part in range(4)]
        assert memory.bytes_by_way == (0, 4 * PAGE * PAGES)
    logged = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert ["over the network" in record.getMessage() for record in logged] == [True]


def in_a_host(name: str, make):
    """Return the constructor of buffers that name this host."""

    def made(self, size: int) -> None:
        make(self, size)
        self.place = msgspec.structs.replace(self.place, host=name)

    return made


def test_a_holder_that_writes_too_late_changes_no_other_part(monkeypatch) -> None:
    monkeypatch.setattr(peer_memory, "PART_SECONDS", 0.2)
    begun, goes_on, written = (threading.Event() for _ in range(3))

    def late(place: BufferPlace, pieces) -> int:
        begun.set()
        assert goes_on.wait(20)
        try:
            return fill(place, [b"late" for _ in pieces])
        finally:
            written.set()

    with pulling() as (memory, _):
        monkeypatch.setattr(pulling_module, "fill", late)
        assert pull(memory, 0) is None
        assert begun.is_set()
        (channel,) = memory.channels.values()
        assert not channel.usable
        channel.failed_until = 0.0
        monkeypatch.setattr(peer_memory, "PART_SECONDS", 20.0)
        monkeypatch.setattr(pulling_module, "fill", fill)
        buffer = memory._buffers.take(PAGE * PAGES + 200)
        goes_on.set()
        assert written.wait(20)
        assert buffer.read(10) == bytes(10), "it is not the one that the holder was given"
        memory._buffers.give(buffer)
        assert pull(memory, 1) == pages_of(1)


HOLDING = """
import os, sys, time
from headwater.cluster.pulling import PartServer
from headwater.cluster.sockets import PLAIN
from tests.cluster.test_shared_buffers import HOLDER, SameParts
write = os.pwrite
def first_alone(file, piece, at):
    if at:
        print("in the middle", flush=True)
        time.sleep(60)
    return write(file, piece, at)
if "stalls" in sys.argv:
    os.pwrite = first_alone
server = PartServer(SameParts(), HOLDER, "tcp://127.0.0.1:*", PLAIN)
server.start()
print(server.contact.address, flush=True)
time.sleep(60)
"""


def holder(*words: str) -> tuple[subprocess.Popen[str], str]:
    """Start a holder in a process of its own; return it, and its address."""
    process = subprocess.Popen([sys.executable, "-c", HOLDING, *words], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("is_known", [True, False], ids=["a router says so", "it is silent"])
def test_a_holder_killed_in_mid_part_is_left(monkeypatch, is_known: bool) -> None:
    monkeypatch.setattr(peer_memory, "PART_SECONDS", 60.0 if is_known else 0.5)
    process, address = holder("stalls")
    with pulling(address) as (memory, _):
        found: list[bytes | None] = []
        reader = threading.Thread(target=lambda: found.append(pull(memory, 0)))
        reader.start()
        assert process.stdout.readline() == "in the middle\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        if is_known:
            memory.know(set())
        reader.join(20)
        assert found == [None]
        assert not memory.reachable
        assert not memory._buffers._free, "its buffer is closed"
    until(lambda: "memfd:headwater-part" not in Path("/proc/self/maps").read_text())


def test_a_read_that_raises_leaves_no_buffer(monkeypatch) -> None:
    def fail(*given: object) -> None:
        raise OSError("of the test")

    with pulling() as (memory, _):
        monkeypatch.setattr(Channel, "ask", fail)
        before = open_files()
        for part in range(4):
            with pytest.raises(OSError, match="of the test"):
                pull(memory, part)
        assert open_files() <= before


def test_a_part_comes_from_another_process() -> None:
    process, address = holder()
    try:
        with pulling(address) as (memory, _):
            assert [pull(memory, part) for part in range(4)] == [pages_of(part) for part in range(4)]
            assert memory.bytes_by_way == (4 * PAGE * PAGES, 0)
    finally:
        process.kill()
        process.wait()
