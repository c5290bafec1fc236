"""Does resident memory stay flat over very many requests?

    python -m stress.memory [--requests 100000] [--over-http 5000]

Each request has a namespace, a seed and a stop string that none had before; a fifth are cancelled, some run into their
deadline, of those over HTTP a seventh hang up. The model computes nothing, so that what is measured is the server.
Prints resident memory ten times; exits with 1 if it grows after the first fifth, or a container with it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time

from headwater.cache.eviction.headwater import GHOSTS_A_CHECKPOINT
from headwater.server.prompt.encoding import CACHE_BYTES, ENTRY_OVERHEAD_BYTES
from stress.census import census, grown
from stress.live_server import LiveServer, embedded_model, release_free_memory, resident_bytes
from stress.short_requests import ShortRequests, send_over_http

PAGES = 400
ROUNDS = 10
WARM_ROUNDS = 2  # caches of bounded size fill up
MAX_GROWTH = 16 * 2**20  # bytes, from the end of the warm-up on

# Rings, memories and pages of a fixed number, that fill up with requests: how much they hold at most.
HISTORY = 2 * (4 * PAGES + 8)  # units of two generations, each full after one prompt more
CAPACITIES = {
    "Ghosts.row_of": GHOSTS_A_CHECKPOINT * PAGES,
    "Ghosts.keys": GHOSTS_A_CHECKPOINT * PAGES,
    "Node: instances": PAGES + HISTORY,  # each has a page at least, or a unit of evicted KV
    "Root: instances": PAGES + HISTORY,
    "Root.children": PAGES + HISTORY,
    "Node.children": PAGES + HISTORY,
    "Index.roots": PAGES + HISTORY,
    "LazyHeap._keys": 2 * PAGES + 64,  # swept at twice its candidates and 64
    "LazyHeap._heap": 2 * PAGES + 64,
    "EvictionLog._entries": 4096,
    "Shares._served": 1024 + 64,
    "Recent._ring": 100,
    "Timeline._ring": 900,
    "Deadlines._heap": 1000 + 128,
    "ConstraintCompiler._compiled": 64,
    "PromptEncoder._kept": CACHE_BYTES // ENTRY_OVERHEAD_BYTES,
}
SLACK = 64  # items by which a container may differ from one moment to another


def main() -> int:
    parser = argparse.ArgumentParser(description="Resident memory over very many requests.")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--over-http", type=int, default=5_000)
    args = parser.parse_args()
    logging.getLogger("headwater").setLevel(logging.CRITICAL)
    sizes, counts = [], []
    with LiveServer(*embedded_model(), PAGES, max_waiting=64) as server:
        requests, begun = ShortRequests(server.engine), time.monotonic()
        for done in range(ROUNDS):
            http = args.over_http // ROUNDS
            requests.send(args.requests // ROUNDS - http)
            asyncio.run(send_over_http(server.url, server.port, http, done * http))
            server.check_idle()
            release_free_memory()
            sizes.append(resident_bytes())
            counts.append(census())
            took = time.monotonic() - begun
            sent = (done + 1) * (args.requests // ROUNDS)
            print(f"{sent:>9,} requests {sizes[-1] / 2**20:9.1f} MiB {took:7.1f} s", flush=True)
        print(f"through the engine: {requests.ended}; over HTTP: {args.over_http:,}")
    growth = sizes[-1] - sizes[WARM_ROUNDS - 1]
    per_request = growth / (args.requests * (1 - WARM_ROUNDS / ROUNDS))
    print(f"growth after {WARM_ROUNDS} of {ROUNDS} rounds: {growth / 2**20:.1f} MiB, {per_request:.1f} bytes a request")
    leaks = grown(counts[WARM_ROUNDS - 1], counts[-1], CAPACITIES, SLACK)
    for name, (before, after) in leaks.items():
        print(f"GROWS {name}: {before:,} to {after:,}")
    return 1 if leaks or growth > MAX_GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
