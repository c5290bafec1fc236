"""Cost of the default eviction policy's decisions: time a request, and memory a checkpoint.

    python -m benchmarks.decisions [--checkpoints 10000,1000000] [--requests 20000] [--small] [--out FILE]

Chains of checkpoints, 1 to 32 units apart. A request resumes at the end of one, the more likely the more recent it is,
and takes two checkpoints below it; two are evicted for them. Counted are the processor time over that of the same
requests and evictions without a policy, which are served in turns, and the bytes that the policy holds (`tracemalloc`)
once it knows all checkpoints, and at its peak until then. There are at least 1/16 as many requests as checkpoints, in
which the rates are renewed three times. The policy remembers as many evicted checkpoints as it may, 8 for each in
memory, and knows none of the prompts from them. `ms a renewal` is the time of one renewal of the rates, a part of which
is done in each tick; a request waits for one part. Bytes of a ghost entry are those that the policy holds more after
1/4 as many requests as checkpoints, which leave the first ones.
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from array import array
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from benchmarks import measure
from headwater.cache.eviction import make_eviction
from headwater.cache.eviction.base.policy import Eviction, Room
from headwater.cache.eviction.headwater import GHOSTS_A_CHECKPOINT, Headwater
from headwater.cache.index import Index
from headwater.cache.node import Node, Observer
from headwater.cli.common import prepare_outputs
from headwater.plan import CacheLayout, Draft, PrefillFlops
from papers.results import refuse_dirty_tree, write_results

UNIT, CHAIN, STATE = 4, 4, (0,)  # bytes of a unit; checkpoints of a chain; pages of a checkpoint
SETTLED = 4  # requests before those that are counted: 1/4 of the checkpoints, at most as many as are counted
RENEWED = 16  # requests that are counted: at least 1/16 of the checkpoints
TURNS = 10  # of requests with the policy, and then without


class Passing(Observer):
    """Observer that passes changes on to another one."""

    to = Observer()

    def changed(self, node: Node) -> None:
        self.to.changed(node)

    def touched(self, node: Node) -> None:
        self.to.touched(node)


class Traffic:
    """Requests to an index that holds a fixed number of checkpoints."""

    def __init__(self, checkpoints: int) -> None:
        self._observer, self._dice = Passing(), random.Random(0)
        self._policy: Eviction | None = None
        self.hits = 0
        self.layout = CacheLayout(
            8 * checkpoints, unit_bytes=UNIT, checkpoint_pages=8, flops=PrefillFlops(linear=1e9, quadratic=1e3)
        )
        self.index = Index(UNIT, 0, self._observer)
        self._root, self._now, self._made = self.index.root(""), 0, 0
        self._ends: list[Node] = []
        self._nodes: list[Node] = [self._root] * 2  # by serial; the root has 1
        while self.index.checkpoints < checkpoints:
            self._grow(self._root, *self._prompt(self._root, CHAIN))

    def _prompt(self, node: Node, number: int) -> tuple[bytes, list[int]]:
        """Return a new key that continues from a node, and the depths at which it takes checkpoints."""
        self._made += 1
        lengths = [self._dice.randint(1, 32) for _ in range(number)]
        key = bytes(node.end * UNIT) + self._made.to_bytes(UNIT, "little") * sum(lengths)
        return key, [node.end + length for length in accumulate(lengths)]

    def _grow(self, node: Node, key: bytes, stops: Sequence[int]) -> None:
        self._now += 1
        for stop in stops:
            node = self.index.add(node, key, stop, array("i"))
            self.index.save(node, STATE, self._now)
            self._nodes.append(node)
        self._ends.append(node)

    @property
    def policy(self) -> Headwater:
        assert isinstance(self._policy, Headwater)
        return self._policy

    @property
    def ghosts(self) -> int:
        """Number of ghost entries."""
        return len(self.policy.ghosts)

    def remember(self) -> None:
        """Fill the ghost entries, with prefixes that no request has."""
        ghosts, dice = self.policy.ghosts, random.Random(1)
        for _ in range(GHOSTS_A_CHECKPOINT * self.index.checkpoints):
            now = dice.randrange(1, self._now)
            ghosts.put(dice.getrandbits(63), 0, 0, dice.randrange(now), now)

    def renewal(self) -> list[float]:
        """Return the seconds of the processor that each part of a renewal of the rates takes, a part in each tick."""
        policy, parts = self.policy, list[float]()
        policy._noted += self.index.checkpoints
        while policy._noted or policy._work is not None:
            policy._now += 1
            begin = time.process_time()
            policy._renew_if_due()
            parts.append(time.process_time() - begin)
        return parts

    def begin(self) -> None:
        """Let a policy know all checkpoints."""
        policy = make_eviction("headwater", self.layout)
        for node in [node for node in self.index if node.checkpoint is not None]:
            policy.changed(node)
        self._policy = self._observer.to = policy

    def serve(self, requests: int, victims: Sequence[int] = ()) -> array[int]:
        """Serve requests; return serials of what was evicted. victims: without a policy, those of a run with one."""
        found, given = array("q"), iter(victims)
        for _ in range(requests):
            self._now += 1
            back = int(self._dice.expovariate(8 / len(self._ends)))
            end = self._ends[-1 - min(back, len(self._ends) - 1)]
            if end.checkpoint is None:
                end = self._root
            else:
                self.hits += 1
                end.hits += 1
                self.index.resume(end, self._now)
            key, stops = self._prompt(end, 2)
            if self._policy is not None:
                tokens = stops[-1] * self.layout.unit_tokens + 1  # the last one is computed in any case
                self._policy.begun(Draft(0, "", key, end.end * self.layout.unit_tokens, tokens), end, self._now)
            self._grow(end, key, stops)
            for _ in range(2):
                node = self._nodes[next(given)] if self._policy is None else self._victim(self._policy)
                found.append(node.serial)
                self.index.drop(node)
        return found

    def _victim(self, policy: Eviction) -> Node:
        victim = policy.victim(Room.STATE, self._now)
        assert victim is not None, "every checkpoint may go"
        return victim[0]


def memory(checkpoints: int, requests: int) -> tuple[float, float, float]:
    """Return the bytes of a checkpoint, once all are known and at the peak until then, and those of a ghost entry.

    After requests the policy holds what is traced beyond that of the same requests without it.
    """
    traffic, bare = Traffic(checkpoints), Traffic(checkpoints)
    tracemalloc.start()
    traffic.begin()
    known, peak = tracemalloc.get_traced_memory()
    victims = traffic.serve(requests)
    held = tracemalloc.get_traced_memory()[0] - known
    tracemalloc.stop()
    tracemalloc.start()
    bare.serve(requests, victims)
    held -= tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return known / checkpoints, peak / checkpoints, held / traffic.ghosts


def cost(checkpoints: int, requests: int) -> dict[str, float]:
    """Return microseconds a request and bytes a checkpoint."""
    requests = max(requests, checkpoints // RENEWED)
    before = min(requests, checkpoints // SETTLED)
    traffic, bare = Traffic(checkpoints), Traffic(checkpoints)
    traffic.begin()
    traffic.remember()
    bare.serve(before, traffic.serve(before))
    hits, seconds = traffic.hits, 0.0
    for turn in range(TURNS):
        part = requests * (turn + 1) // TURNS - requests * turn // TURNS
        begin = time.process_time()
        victims = traffic.serve(part)
        middle = time.process_time()
        bare.serve(part, victims)
        seconds += 2 * middle - begin - time.process_time()
    parts = traffic.renewal()
    known, peak, ghost = memory(checkpoints, before)
    return {
        "checkpoints": checkpoints,
        "requests": requests,
        "hits a request": round((traffic.hits - hits) / requests, 2),
        "us a request": round(1e6 * seconds / requests, 1),
        "ms a renewal": round(1e3 * sum(parts), 1),
        "ms of its longest part": round(1e3 * max(parts), 2),
        "bytes a checkpoint": round(known, 1),
        "bytes a checkpoint, peak": round(peak, 1),
        "ghosts": traffic.ghosts,
        "bytes a ghost": round(ghost, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=measure.numbers, default=(10_000, 1_000_000))
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--small", action="store_true", help="sizes that only show that it runs; replaces no results")
    parser.add_argument("--out", type=Path, default=measure.RESULTS / "decisions.json")
    given = parser.parse_args()
    prepare_outputs(given.out)
    refuse_dirty_tree(given.out, small=given.small)
    rows = []
    for number in (200,) if given.small else given.checkpoints:
        rows.append(cost(number, 50 if given.small else given.requests))
        print(*(f"{name} {value:,}" for name, value in rows[-1].items()), sep="; ", flush=True)
    write_results(given.out, {"run": measure.machine(), "rows": rows}, seed=0, small=given.small)


if __name__ == "__main__":
    main()
