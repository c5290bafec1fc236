"""Costs of KV events, and the time until a reader's picture of a server is whole.

    python -m benchmarks.kv_events [--repeats 5] [--blocks 1000000] [--small]

No model runs. A step is one prefill of 1,024 tokens with two checkpoints in a full memory, so it evicts as much. Its
requests run on a cache with a log of changes and on one without, in turns; what the publisher's thread does with these
changes, and a reader with their messages, is timed apart. The picture is that of a worker with as many blocks in
prefixes of 500. Times are CPU time of one thread.
"""

from __future__ import annotations

import os
import random
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator

from benchmarks import measure
from benchmarks.measure import Row
from headwater.cache.changes import IGNORED, NONE, Change, ChangeLog, Changes, KvStored
from headwater.cache.prefix_cache import PrefixCache
from headwater.cluster.ledger import EventStream, Ledger, Tokens
from headwater.cluster.messages import Digests, Message
from headwater.cluster.picture import Picture
from headwater.plan import CacheLayout, Draft, Saving

CHAIN = 500  # blocks
TOKENS = 1024  # of a step
STEPS = 300
LAYOUT = CacheLayout(n_pages=2_000, checkpoint_pages=25, slot_pages=25)
KEY = bytes(32)


def cpu_timed(run: Callable[[], object]) -> Callable[[], float]:
    """Return the same work, returning the CPU seconds that it took: cores are shared."""

    def seconds() -> float:
        begun = time.thread_time()
        run()
        return time.thread_time() - begun

    return seconds


class Steps:
    """A cache in which each request is one step."""

    def __init__(self, changes: Changes, seed: int) -> None:
        self.cache = PrefixCache(LAYOUT, "headwater", changes=changes)
        self._random = random.Random(seed)
        self._requests = 0

    def run(self, count: int) -> None:
        """Run steps, each with a prompt of its own."""
        for _ in range(count):
            self._requests += 1
            key = self._random.randbytes(4 * TOKENS)
            checkpoints = TOKENS // 2, TOKENS
            plan = self.cache.reserve(Draft(self._requests, "", key, 0, TOKENS, TOKENS, Saving(checkpoints), slot=True))
            self.cache.commit(plan)
            self.cache.release(self._requests)


def stream_of(layout: CacheLayout) -> EventStream:
    return EventStream(Ledger(layout, Digests(KEY, layout.unit_bytes), Tokens()), bytes(16))


def chains(blocks: int) -> Iterator[Change]:
    """Yield that number of blocks, in prefixes of CHAIN blocks."""
    for first in range(0, blocks, CHAIN):
        pages = array("i", range(first, min(first + CHAIN, blocks)))
        yield KvStored("", NONE, 0, os.urandom(256 * len(pages)), pages)


def step_rows(steps: int, repeats: int, seed: int) -> list[Row]:
    """Time steps with a log and without, and what becomes of a log."""
    logs = ChangeLog(), ChangeLog()
    off, on, published = (Steps(changes, seed) for changes in (IGNORED, *logs))
    for one in (off, on, published):
        one.run(100)  # memory is full
    for log in logs:
        log.take()
    stream, picture = stream_of(LAYOUT), Picture()
    assert picture.apply(stream.begin(published.cache.contents()))
    sent: list[Message] = []
    reading: list[float] = []  # seconds

    def unlogged() -> None:
        for _ in range(steps):
            off.run(1)

    def logged() -> None:
        for _ in range(steps):
            on.run(1)
            logs[0].take()

    def publish() -> float:
        """Return the seconds that the publisher's thread takes for the changes of the steps."""
        seconds = 0.0
        for _ in range(steps):
            published.run(1)
            changes = logs[1].take()
            begun = time.thread_time()
            sent.append(stream.step(changes))
            seconds += time.thread_time() - begun
        begun = time.thread_time()
        assert all(picture.apply(message) for message in sent[-steps:])
        reading.append(time.thread_time() - begun)
        return seconds

    work = {"off": cpu_timed(unlogged), "on": cpu_timed(logged), "publish": publish}
    figures = measure.in_turns(work, repeats)
    micro = 1e6 / steps
    return [
        Row("a step's planning and commit, no log", "us", [s * micro for s in figures["off"]]),
        Row("the same with a log of changes / without", "x", measure.ratios(figures["on"], figures["off"])),
        Row("digests and encoding of a step, other thread", "us", [s * micro for s in figures["publish"]]),
        Row("a reader takes a step's message", "us", [s * micro for s in reading[-repeats:]]),
        Row("bytes of a step's message", "bytes", [sum(len(message.payload) for message in sent) / len(sent)]),
    ]


def picture_rows(blocks: int, repeats: int) -> list[Row]:
    """Time a snapshot of that number of blocks, and a reader that takes it."""
    stream = stream_of(CacheLayout(n_pages=blocks))
    stream.begin(list(chains(blocks)))
    messages = list(stream.snapshot())

    def load() -> None:
        assert Picture().load(messages)

    figures = measure.in_turns({"write": cpu_timed(lambda: list(stream.snapshot())), "load": cpu_timed(load)}, repeats)
    million = 1e6 / blocks
    write, read = ([s * million for s in figures[name]] for name in ("write", "load"))
    size = sum(len(message.payload) for message in messages) * million
    return [
        Row("snapshot of a million blocks, worker", "s", write),
        Row("snapshot of a million blocks, reader", "s", read),
        Row("the two one after the other", "s", [sum(both) for both in zip(write, read, strict=True)], "<= 1"),
        Row("bytes of a million blocks", "MB", [size / 1e6]),
        Row("memory of a picture of a million blocks", "MB", [memory_of(messages) * million / 1e6]),
    ]


def memory_of(messages: list[Message]) -> int:
    """Return the bytes of a picture that has taken these messages."""
    tracemalloc.start()
    picture = Picture()
    assert picture.load(messages)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size


def main() -> None:
    parser = measure.parser(__doc__, "kv_events", repeats=5)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    given = measure.prepared(parser)
    steps, blocks = (20, 5_000) if given.small else (STEPS, given.blocks)
    rows = step_rows(steps, given.repeats, given.seed) + picture_rows(blocks, given.repeats)
    measure.report(given, rows, blocks=blocks, tokens_a_step=TOKENS)


if __name__ == "__main__":
    main()
