"""Speed and memory of the index.

    python -m benchmarks.index [--repeats 7] [--small] [--peers FOLDER] [--peer-python PYTHON]

One core, page 64, no checks. Each repetition runs all pieces in turn, `bytes.startswith` over the same bytes among
them, and ratios are taken within a repetition. Times are CPU time of the one thread, since cores are shared. `--peers`
names a folder with a `bench_index.py` that runs Headwater's adapters beside another engine's tree, in processes of
their own that take turns; it reports wall time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.index_adapter import Headwater, HeadwaterLearned, HeadwaterRequests, HeadwaterSegLen, Key
from benchmarks.index_workload import VOCABULARY, fresh, np, workload
from benchmarks.measure import RESULTS, machine
from headwater.cache import PrefixCache
from headwater.cli.common import prepare_outputs
from headwater.plan import CacheLayout, Draft, Saving
from papers.results import refuse_dirty_tree, write_results

HERE = Path(__file__).parent
PAGE, SEED = 64, 7
SEQUENCES, SMALL_SEQUENCES = 2000, 100
BIG = 1 << 25  # tokens: more than the workload holds
STARTSWITH = "bytes.startswith over the same bytes"


@dataclass
class Row:
    """One figure. `values` has one per repetition; `goal` is what the median is held to."""

    name: str
    unit: str
    values: list[float]
    goal: str = ""

    @property
    def best(self) -> float:
        return max(self.values) if self.unit in ("Mtok/s", "x", "requests/s", "evictions/s") else min(self.values)

    def __str__(self) -> str:
        median = statistics.median(self.values)
        return f"{self.name:<44}{median:>12,.2f}{self.best:>12,.2f}  {self.unit:<11}{self.goal}"


def seconds(run: Callable[..., object], items: Iterable[tuple[object, ...]]) -> float:
    """CPU time of `run` over all items."""
    gc.collect()
    start = time.thread_time()
    for item in items:
        run(*item)
    return time.thread_time() - start


@dataclass
class Prompts:
    """The workload as keys; `probes` go 100 tokens further, `copies` are the same bytes in other memory."""

    keys: list[Key]
    probes: list[Key]
    copies: list[bytes]
    tokens: int

    @classmethod
    def make(cls, n_sequences: int) -> Prompts:
        rng = np.random.default_rng(1)
        turns = workload(n_sequences, seed=SEED)
        key = Headwater(PAGE, BIG, 1).prepare
        keys = [key(turn) for turn in turns]
        probes = [key(np.concatenate([turn, fresh(rng, 100)])) for turn in turns]
        copies = [bytes(bytearray(tokens[: n_pages * 4 * PAGE])) for tokens, n_pages in keys]
        return cls(keys, probes, copies, sum(len(turn) for turn in turns))


def tree_speed(prompts: Prompts) -> dict[str, float]:
    """Mtok/s of insert and match, alone and against `startswith`, in one repetition."""
    tree = Headwater(PAGE, BIG, len(prompts.keys))
    cache = HeadwaterRequests(PAGE, BIG, len(prompts.keys))
    in_tokens = [((tokens, n_pages * PAGE),) for tokens, n_pages in prompts.keys]
    probes = [((tokens, n_pages * PAGE),) for tokens, n_pages in prompts.probes]
    compare = [(tokens, copy) for (tokens, _), copy in zip(prompts.keys, prompts.copies, strict=True)]
    spent = {
        STARTSWITH: seconds(bytes.startswith, compare),
        "insert, tree": seconds(tree.insert, zip(prompts.keys, strict=True)),
        "match, tree": seconds(tree.match, zip(prompts.probes, strict=True)),
    }
    again = seconds(bytes.startswith, compare)
    spent[STARTSWITH] = (spent[STARTSWITH] + again) / 2
    spent["reserve + commit + release"] = seconds(cache.insert, in_tokens)
    spent["match, PrefixCache"] = seconds(cache.match, probes)
    figures = {name: prompts.tokens / spent[name] / 1e6 for name in spent}
    for name in ("match, tree", "insert, tree", "match, PrefixCache"):
        figures[f"{name} / startswith"] = figures[name] / figures[STARTSWITH]
    return figures


def eviction_us(made: type[Headwater], n_checkpoints: int = 10_000, n_evictions: int = 2000) -> float:
    """Microseconds to evict one of 10,000 checkpoints: chains of four, 1 to 8 pages apart, used in random order."""
    rng = random.Random(SEED)
    cache = made(PAGE, BIG, n_checkpoints)
    for chain in range(n_checkpoints // 4):
        tokens = np.random.default_rng(chain).integers(0, VOCABULARY, 32 * PAGE, dtype=np.int32).tobytes()
        end = 0
        for _ in range(4):
            end += rng.randint(1, 8)
            cache.insert((tokens, end))
    nodes = [node for node in cache.index if node.checkpoint is not None]
    assert len(nodes) == n_checkpoints
    rng.shuffle(nodes)
    for node in nodes:
        cache.now += 1
        cache.index.resume(node, cache.now)
    cache.evict_states(100)
    return seconds(cache.evict_states, [(1,)] * n_evictions) / n_evictions * 1e6


def mixed(made: type[Headwater] | type[HeadwaterRequests], prompts: Prompts) -> float:
    """Requests a second with 2,000,000 tokens of KV and 256 checkpoints: match, make room, insert."""
    cache = made(PAGE, 2_000_000 // PAGE * PAGE, 256)

    def request(tokens: bytes, n_pages: int) -> None:
        key = (tokens, n_pages)
        hit = cache.match(key)[1]
        handle = cache.lock()
        kv, states = cache.free()
        needed = len(tokens) // 4 // PAGE * PAGE - hit
        if kv < needed:
            cache.evict_kv(needed - kv)
        if not states:
            cache.evict_states(1)
        cache.insert(key, hit)
        cache.unlock(handle)

    keys = [cache.prepare(np.frombuffer(tokens, dtype=np.int32)) for tokens, _ in prompts.keys]
    return len(keys) / seconds(request, keys)


def request_us(shared: int, n_pages: int, n_requests: int = 400) -> float:
    """Microseconds of match + reserve + commit for 8,192 tokens of which `shared` are cached, with two checkpoints."""
    length, publish = 8192, 8192 - PAGE
    cache = PrefixCache(CacheLayout(n_pages, checkpoint_pages=24, slot_pages=24))
    rng = np.random.default_rng(SEED)
    head = fresh(rng, shared)
    prompts = [np.concatenate([head, fresh(rng, length - shared)]).tobytes() for _ in range(n_requests + 20)]
    spent = 0.0
    for request, key in enumerate(prompts):
        start = time.thread_time()
        match = cache.match(key, length)
        places = tuple(at for at in (4096, publish) if at > match.checkpoint_tokens)
        draft = Draft(request, "", key, match.checkpoint_tokens, length, publish, Saving(places), slot=True)
        cache.commit(cache.reserve(draft))
        spent += (time.thread_time() - start) * (request >= 20)
        cache.release(request)
    return spent / n_requests * 1e6


def reporting(n_chains: int = 2500) -> dict[str, float]:
    """Measure a metrics scrape and a view of the live page, on a cache of 10,000 nodes in chains of four."""
    cache = PrefixCache(CacheLayout(40 * n_chains, checkpoint_pages=1, slot_pages=0))
    for chain in range(n_chains):
        key, end = fresh(np.random.default_rng(chain), 16 * PAGE).tobytes(), 16 * PAGE
        draft = Draft(chain, "", key, 0, end, end, Saving(tuple(range(4 * PAGE, end + 1, 4 * PAGE))))
        cache.commit(cache.reserve(draft))
        cache.release(chain)
    assert cache.stats().nodes == 4 * n_chains
    stats, view = (seconds(call, [()] * 20) / 20 for call in (cache.stats, cache.view))
    return {"stats of 10,000 nodes": stats * 1e6, "view of 10,000 nodes": view * 1e3}


def bytes_a_token(prompts: Prompts) -> float:
    """Allocated bytes of tree, pool and policy for each token of KV that is held, the workload's 22 M tokens in."""
    gc.collect()
    tracemalloc.start()
    cache = HeadwaterRequests(PAGE, BIG // 4, len(prompts.keys))
    for tokens, n_pages in prompts.keys:
        cache.insert((tokens, n_pages * PAGE))
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / cache.counts()[0]


GOALS = {
    STARTSWITH: ("Mtok/s", ""),
    "match, tree": ("Mtok/s", ""),
    "match, tree / startswith": ("x", ">= 0.4"),
    "insert, tree": ("Mtok/s", ""),
    "insert, tree / startswith": ("x", ">= 0.2"),
    "match, PrefixCache": ("Mtok/s", ""),
    "match, PrefixCache / startswith": ("x", ""),
    "reserve + commit + release": ("Mtok/s", ""),
    "evict one of 10,000 checkpoints, lru": ("us", "<= 5"),
    "evict one of 10,000 checkpoints, seglen": ("us", "<= 50"),
    "evict one of 10,000 checkpoints, headwater": ("us", "<= 20"),
    "mixed load, tree": ("requests/s", ""),
    "mixed load, PrefixCache": ("requests/s", ""),
    "8k request: match + reserve + commit, cold": ("us", "<= 100"),
    "8k request, 4k of it cached": ("us", "<= 100"),
    "8k request, 4k of it cached, evicting": ("us", "<= 100"),
    "stats of 10,000 nodes": ("us", ""),
    "view of 10,000 nodes": ("ms", ""),
}


def repetition(prompts: Prompts) -> dict[str, float]:
    """Every figure once."""
    return tree_speed(prompts) | {
        "evict one of 10,000 checkpoints, lru": eviction_us(Headwater),
        "evict one of 10,000 checkpoints, seglen": eviction_us(HeadwaterSegLen),
        "evict one of 10,000 checkpoints, headwater": eviction_us(HeadwaterLearned),
        "mixed load, tree": mixed(Headwater, prompts),
        "mixed load, PrefixCache": mixed(HeadwaterRequests, prompts),
        "8k request: match + reserve + commit, cold": request_us(0, 200_000),
        "8k request, 4k of it cached": request_us(4096, 200_000),
        "8k request, 4k of it cached, evicting": request_us(4096, 2_000),
        **reporting(),
    }


def measure(repeats: int, n_sequences: int) -> list[Row]:
    """All rows; a first repetition does not count."""
    prompts = Prompts.make(n_sequences)
    turns: list[dict[str, float]] = []
    for turn in range(repeats + 1):
        turns.append(repetition(prompts))
        print(f"# repetition {turn} of {repeats} done", file=sys.stderr, flush=True)
    rows = [Row(name, unit, [figures[name] for figures in turns[1:]], goal) for name, (unit, goal) in GOALS.items()]
    return [*rows, Row("bookkeeping", "bytes/token", [bytes_a_token(prompts)], "<= 8")]


def peers(folder: Path, python: str, repeats: int) -> list[Row]:
    """The shared benchmark's figures for Headwater and the peer, and their ratios; wall time, page 64."""
    ours, theirs = ["index_adapter:Headwater", "index_adapter:HeadwaterRequests"], "sglang-rust-core"
    path = os.pathsep.join([str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as out:
        result = Path(out) / "peers.json"
        command = [python, "-W", "ignore", str(folder / "bench_index.py"), "--adapters", ",".join([*ours, theirs])]
        command += ["--pages", str(PAGE), "--repeats", str(repeats), "--out", str(result)]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.DEVNULL)
        runs = json.loads(result.read_text())["runs"]
    rows = []
    for what, field, unit, goal in PEER_FIGURES:
        base = [run[what][field] for run in runs[f"{theirs}/{PAGE}"]]
        rows.append(Row(f"{what}, {theirs}", unit, base))
        for name in ours:
            figures = [run[what][field] for run in runs[f"{name}/{PAGE}"]]
            ratios = [figure / other for figure, other in zip(figures, base, strict=True)]
            label = name.split(":")[1]
            held = goal if label == "Headwater" else ""
            rows += [Row(f"{what}, {label}", unit, figures), Row(f"{what}, {label} / peer", "x", ratios, held)]
    return rows


PEER_FIGURES = [
    ("match", "mtok_s", "Mtok/s", ">= 2.5"),
    ("insert", "mtok_s", "Mtok/s", ">= 5"),
    ("mixed", "ops_s", "requests/s", ">= 3"),
    ("evict_1_state", "ops_s", "evictions/s", ""),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="sizes that only show that it runs; replaces no results")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--out", type=Path, default=RESULTS / "index.json")
    options = parser.parse_args()
    prepare_outputs(options.out)
    refuse_dirty_tree(options.out, small=options.small)
    rows = measure(options.repeats, SMALL_SEQUENCES if options.small else SEQUENCES)
    if options.peers is not None:
        rows += peers(options.peers, options.peer_python, options.repeats)
    print(f"{'':<44}{'median':>12}{'best':>12}")
    for row in rows:
        print(row)
    report = {"run": machine() | {"repeats": options.repeats}, "rows": [asdict(row) for row in rows]}
    write_results(options.out, report, seed=SEED, small=options.small)


if __name__ == "__main__":
    main()
