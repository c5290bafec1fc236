"""Cost of a pull between two workers: processor seconds per gigabyte, and bandwidth, by transport of parts.

    python -m benchmarks.pulls [--megabytes 400] [--repeats 5] [--out FILE]

One worker's parts are sealed, sent, received and checked, by the code of workers, two at a time: over TCP on loopback
and over IPC, plain and with CURVE, and through shared memory with CURVE for the questions. Both ends are in this
process. A part has the bytes of 1,024 tokens of Qwen3.5-0.8B. The transports take turns. Processor time is that of all
threads of both ends; bandwidth depends on the machine's other load.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure import console, machine
from headwater.cli.common import prepare_outputs
from headwater.cluster.peer_memory import PeerMemory
from headwater.cluster.pulling import PartServer, own_security
from headwater.cluster.shared_buffers import this_host
from headwater.cluster.sockets import PLAIN
from headwater.cluster.wire import Peer
from headwater.table import Table
from headwater.tiers.names import RUN
from headwater.tiers.part import HEADER, SEAL_BYTES, Buffer, Part, PartPlace, Prefix, Sealer
from papers.results import refuse_dirty_tree, write_results

OUT = Path(__file__).resolve().parent / "results" / "pull_cost.json"
PAGE_BYTES, PAGES = 64 * 12_288, 16
KEY, INCARNATION = bytes(range(32)), b"sender"
PROMPT = bytes(4 * 64 * PAGES)  # the index key of a part's tokens
READERS = 2
SHARED = "shared memory"


class SyntheticParts:
    """Parts of one prefix, which have the same content."""

    def __init__(self, count: int) -> None:
        self._page, self._sealer = bytes(PAGE_BYTES), Sealer(KEY)
        self.places = [PartPlace(f"{RUN}{number}", RUN, PAGES) for number in range(count)]

    def find(self, namespace: str, key: bytes, tokens: int) -> Prefix:
        return Prefix(namespace, key, tokens, self.places)

    @contextmanager
    def sealed(self, prefix: Prefix, part: int) -> Iterator[list[Buffer] | None]:
        yield self._sealer.seal(prefix.places[part].name, Part(RUN, 0, PAGES, PROMPT, [self._page] * PAGES))


def pulled(parts: SyntheticParts, transport: str) -> tuple[float, float]:
    """Pull all parts; return seconds on the clock, and of a processor."""
    server, client = (PLAIN, PLAIN) if transport.endswith("plain") else own_security()
    folder = TemporaryDirectory()  # of mode 0700
    address = f"ipc://{folder.name}/parts" if transport.startswith("IPC") else "tcp://127.0.0.1:*"
    sender = PartServer(parts, INCARNATION, address, server)
    memory, sealer = PeerMemory(b"receiver", client), Sealer(KEY)
    peer = Peer(INCARNATION, sender.contact)
    server.accept([sender.contact.key])
    sender.start()
    memory.know([peer])

    def read(name: str) -> None:
        pieces = [memoryview(bytearray(n)) for n in (HEADER.size, len(PROMPT), *[PAGE_BYTES] * PAGES, SEAL_BYTES)]
        assert memory.read_into(name, pieces), f"{name} was not sent"
        sealer.check(name, pieces[0], pieces[1], pieces[2:-1], pieces[-1])

    with ThreadPoolExecutor(READERS) as readers:
        memory.ask([INCARNATION], "", PROMPT, 64 * PAGES)
        for channel in memory.channels.values():
            channel.shares = transport == SHARED
        begun, used = time.perf_counter(), time.process_time()
        list(readers.map(read, [place.name for place in parts.places]))
        seconds = time.perf_counter() - begun, time.process_time() - used
    assert bool(memory.bytes_by_way[0]) is (transport == SHARED), "parts came by another transport"
    memory.close()
    sender.close()
    folder.cleanup()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    prepare_outputs(given.out)
    refuse_dirty_tree(given.out)
    parts = SyntheticParts(max(1, given.megabytes * 10**6 // (PAGE_BYTES * PAGES)))
    gigabytes = len(parts.places) * PAGE_BYTES * PAGES / 1e9
    transports = ("TCP, plain", "TCP, CURVE", "IPC, plain", "IPC, CURVE", *([SHARED] if this_host() else []))
    found: dict[str, list[tuple[float, float]]] = {transport: [] for transport in transports}
    for _ in range(given.repeats):
        for name, runs in found.items():
            runs.append(pulled(parts, name))
    shown = Table(f"{gigabytes:.2f} GB in {len(parts.places)} parts", ("transport",), ("processor, s/GB", "GB/s"))
    for name, runs in found.items():
        processor = [used / gigabytes for _, used in runs]
        bandwidth = [gigabytes / seconds for seconds, _ in runs]
        shown.add_row(name, spread(processor), spread(bandwidth))
    console().print(shown)
    document = {"run": machine() | {"repeats": given.repeats}, "gigabytes": gigabytes, "seconds": found}
    write_results(given.out, document, seed=None)


def spread(values: list[float]) -> str:
    """Format the median, the least and the most."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    main()
