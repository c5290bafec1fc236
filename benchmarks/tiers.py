"""Tiers: a long session after a restart, a working set of several times the memory, and the cost where nothing hits.

    python -m benchmarks.tiers [--model FOLDER] [--dtype bfloat16] [--device cuda] [--length 32768] [--folder /tmp]
        [--parts restart choice working_set loss start cost] [--small]

Restart: a prompt is computed and stored (write-through), then a new engine over the same folder answers it with one
token more, with its files out of the page cache and in it. Beside it: reading the same files whole, and the prompt if
memory has all but its last tokens.

Choice: short prompts that are stored are answered by a new engine that loads them if reading is expected to take less
time than computing, one that always loads, and one that never does.

Working set: sessions take turns, each turn appends to its session; memory holds a fifth of them. With `--device cuda` a
tier in the host's memory, too.

Start: a folder with 100,000 states is opened, asked, and listed.

Cost without hits: prompts that share nothing, at once; wall time until all are answered, CPU time until all copies are
made, too, and the slowest steps.

Loss: half of the sessions have one prompt, half of them several turns; then the engine ends without storing anything
more, as `kill -9` ends a server, or stores all, as SIGTERM does, and a new one answers each session's next prompt.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks import measure
from benchmarks.engines import Asked, Model, ask, bench_checkpoint, finished, settle, submit
from benchmarks.measure import Row, ratios
from headwater.config import DEVICES, ServeConfig
from headwater.engine.engine import Engine
from headwater.engine.loop import Planned
from headwater.percentile import percentile
from headwater.spec import ModelSpec
from headwater.tiers.disk import DiskStore
from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.memory import MemoryStore
from headwater.tiers.names import DIGEST_BYTES, STATE, TAG_BYTES, state_name
from headwater.tiers.part import Part, Sealer
from headwater.tiers.redis import RedisStore
from headwater.tiers.store import Store

KEY = bytes(32)
SESSIONS, TURNS, GROWS = 10, 4, 256  # sessions; turns of each; tokens that a turn appends
BEGIN = 1024  # tokens of a session's first prompt
COLD, ANSWER = 8, 32  # prompts that share nothing; tokens of each answer
STATES = 100_000  # in a folder
PARTS = "restart", "choice", "working_set", "loss", "start", "cost"
RULES = "by time", "always", "never"  # when a stored prompt is loaded
SMALL_LENGTH = 512

Opened = Callable[[], list[Store]]
Rows = Iterator[Row]


@contextmanager
def tiered(model: Model, memory: int, stores: list[Store], through: bool = True) -> Iterator[Engine]:
    """A started engine with these stores, whose costs of prefill it learns as it goes."""
    gc.collect()  # of an earlier engine, whose memory is reused, as after a restart
    config = ServeConfig(memory=memory, tier=("disk:unused",), tier_store="through" if through else "selective")
    with model.engines(one=ServeConfig(memory=memory, device=model.loaded.device)) as (engine,):
        if stores:
            with engine.changed:
                engine.use_tiers(stores, KEY, Fingerprint.of({}), config)
        yield engine
        copied(engine)


def copied(engine: Engine) -> None:
    """Wait until all copies are made."""
    with engine.changed:
        while engine.scheduler.tiers.busy:
            engine.changed.wait(1)


def drop_from_page_cache(folder: Path) -> None:
    """Let the system forget the content of a folder's files, so that reading them reads the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def read_all(folder: Path) -> tuple[int, float]:
    """Read all files of a folder; return their bytes and the seconds that it took."""
    size, begun = 0, perf_counter()
    for path in folder.rglob("*"):
        if path.is_file():
            size += len(path.read_bytes())
    return size, perf_counter() - begun


def restart(model: Model, length: int, root: Path, repeats: int, rng: random.Random) -> Rows:
    """Yield rows of a long prompt after a restart."""
    prompt, tail = model.prompt(rng, length), model.prompt(rng, 1)
    page_bytes = model.loaded.spec.page_bytes
    memory = (2 * length // 64 + 40 * max(1, model.loaded.spec.checkpoint_pages) + 64) * page_bytes
    folder = root / "restart"
    with tiered(model, memory, [DiskStore(folder, None)]) as engine:
        computing = [1e3 * ask(engine, prompt).ttft]
    size, _ = read_all(folder)
    suffix, cold, warm, disk, cached, loaded = (list[float]() for _ in range(6))
    for _ in range(repeats):
        for times, reads, prepare in ((cold, disk, drop_from_page_cache), (warm, cached, read_all)):
            prepare(folder)
            reads.append(1e3 * read_all(folder)[1])
            prepare(folder)
            with tiered(model, memory, [DiskStore(folder, None)]) as engine:
                ask(engine, model.prompt(rng, 64))
                engine.meter.by_tokens.note(length, computing[0] / 1e3)
                asked = ask(engine, [*prompt, *tail])
                times.append(1e3 * asked.ttft)
                loaded.append(asked.account.loaded_tokens if asked.account else 0)
                suffix.append(1e3 * ask(engine, [*prompt, *model.prompt(rng, 1)]).ttft)
    yield Row(f"{length:,} tokens: computed", "ms", computing)
    yield Row("bytes stored", "MB", [size / 1e6])
    yield Row("loaded tokens of the prompt", "%", [100 * n / length for n in loaded], ">= 99")
    yield Row("the same prompt in memory", "ms", suffix)
    of_both = (("out of the page cache", cold, disk), ("in the page cache", warm, cached))
    for place, times, reads in of_both:
        yield Row(f"after a restart, files {place}", "ms", times)
        yield Row(f"reading the files, {place}", "ms", reads)
        least = [read + percentile(suffix, 50) for read in reads]
        yield Row(f"after a restart / (reading and suffix), {place}", "x", ratios(times, least), "<= 1.2")


def choices(model: Model, memory: int, root: Path, repeats: int, lengths: Sequence[int], rng: random.Random) -> Rows:
    """Yield rows of stored prompts after a restart: loaded if that is expected to win, always, and never."""
    tail, prompts = model.prompt(rng, 1), {length: model.prompt(rng, length) for length in lengths}
    with tiered(model, memory, [DiskStore(root / "choice", None)]) as engine:
        for prompt in prompts.values():
            ask(engine, prompt)
    for length, prompt in prompts.items():
        ttft = {rule: list[float]() for rule in RULES}
        loaded = list[float]()
        for repeat in range(repeats):
            for rule in (*RULES[repeat % 3 :], *RULES[: repeat % 3]):
                with tiered(model, memory, [DiskStore(root / "choice", None)], through=False) as engine:
                    ask(engine, model.prompt(rng, length))  # what computing takes is known then
                    if rule != "by time":
                        per_token = 1.0 if rule == "always" else 0.0
                        engine.scheduler.tiers.prefill_seconds = lambda n, per_token=per_token: n * per_token  # type: ignore[attr-defined]
                    asked = ask(engine, [*prompt, *tail])
                ttft[rule].append(1e3 * asked.ttft)
                if rule == "by time" and asked.account is not None:
                    loaded.append(100 * asked.account.loaded_tokens / length)
        for rule, times in ttft.items():
            yield Row(f"{length:,} stored tokens, loaded {rule}: TTFT", "ms", times)
        better = [min(pair) for pair in zip(ttft["always"], ttft["never"], strict=True)]
        yield Row(f"{length:,} stored tokens, by time / the better one", "x", ratios(ttft["by time"], better), "<= 1.2")
        yield Row(f"{length:,} stored tokens, by time: loaded", "%", loaded)


def memory_of_a_fifth(spec: ModelSpec, count: int, tokens: int) -> int:
    """Return the bytes of memory for a fifth of `count` sessions of `tokens` tokens, and for what runs."""
    of_a_session = tokens // 64 + 2 * TURNS * spec.checkpoint_pages
    return (count * of_a_session // 5 + 26 * spec.checkpoint_pages // 25 + 64) * spec.page_bytes


def working_set(
    model: Model, opened: dict[str, Opened], rng: random.Random, count: int, begin: int, grows: int
) -> Rows:
    """Yield rows of `count` sessions that memory holds a fifth of."""
    memory = memory_of_a_fifth(model.loaded.spec, count, begin + TURNS * grows)
    sessions = [model.prompt(rng, begin) for _ in range(count)]
    turns = [[model.prompt(rng, grows) for _ in range(count)] for _ in range(TURNS)]
    for name, open_stores in opened.items():
        with tiered(model, memory, open_stores()) as engine:
            prompts = [list(session) for session in sessions]
            asked: list[Asked] = []
            for turn in turns:
                for prompt, more in zip(prompts, turn, strict=True):
                    prompt += more
                    asked.append(ask(engine, prompt))
        later = [one for one in asked[count:] if one.account is not None]
        tokens = sum(one.account.prompt_tokens for one in later if one.account)
        hits = sum(one.account.cached_tokens for one in later if one.account)
        ttft = [1e3 * one.ttft for one in later]
        yield Row(f"working set of 5 x memory, {name}: hits", "%", [100 * hits / tokens])
        for percent in (50, 95):
            yield Row(f"working set of 5 x memory, {name}: TTFT, p{percent}", "ms", [percentile(ttft, percent)])


def lost(model: Model, root: Path, rng: random.Random, count: int, begin: int, grows: int) -> Rows:
    """Yield rows of what a new engine finds of `count` sessions after the end of another; memory holds all of them."""
    ends = {
        "selective, kill -9": (False, False),
        "selective, SIGTERM": (False, True),
        "through, kill -9": (True, False),
    }
    memory, sessions = 1_000_000_000, [model.prompt(rng, begin) for _ in range(count)]
    turns = [[model.prompt(rng, grows) for _ in range(count)] for _ in range(TURNS)]
    for number, (name, (through, flush)) in enumerate(ends.items()):
        folder, prompts = root / f"lost {number}", [list(session) for session in sessions]
        with tiered(model, memory, [DiskStore(folder, None)], through) as engine:
            for nth, turn in enumerate(turns):
                for prompt, more in list(zip(prompts, turn, strict=True))[:: 2 if nth else 1]:
                    prompt += more
                    ask(engine, prompt)
            copied(engine)
            if flush:
                assert engine.tiers is not None, "it has a folder"
                engine.tiers.close(lambda: 60.0)
        with tiered(model, memory, [DiskStore(folder, None)], through) as engine:
            engine.scheduler.tiers.prefill_seconds = float  # type: ignore[attr-defined]  # reading always wins
            asked = [ask(engine, [*prompt, *model.prompt(rng, grows)]) for prompt in prompts]
        for kind, part, own in (
            ("several turns", asked[::2], prompts[::2]),
            ("one prompt", asked[1::2], prompts[1::2]),
        ):
            found = [one.account.loaded_tokens if one.account else 0 for one in part]
            shares = [100 * n / (len(prompt) // 64 * 64) for n, prompt in zip(found, own, strict=True)]
            yield Row(f"after {name}: what is found of sessions of {kind}", "%", shares)


def timed_steps(engine: Engine) -> list[float]:
    """Note the seconds of each step from now on, its planning included."""
    execute, seconds = engine.loop.execute, list[float]()

    def noted(planned: Planned) -> None:
        begun = perf_counter()
        execute(planned)
        seconds.append(planned.seconds + perf_counter() - begun)

    engine.loop.execute = noted  # type: ignore[method-assign]
    return seconds


def start_up(folder: Path, states: int, repeats: int, rng: random.Random) -> Rows:
    """Yield rows of a folder with so many states, small ones: their content is not read."""
    names = [state_name([rng.randbytes(DIGEST_BYTES + TAG_BYTES).hex()], 0) for _ in range(states)]
    sealer, store = Sealer(KEY), DiskStore(folder, None)
    for name in names:
        store.put(name, sealer.seal(name, Part(STATE, 0, 1, bytes(4), [b"state"], 1.0)))
    store.close()
    opened, asked, listed, read = (list[float]() for _ in range(4))
    for _ in range(repeats):
        some, begun = rng.sample(names, min(512, states)), perf_counter()
        store = DiskStore(folder, None)
        opened.append(1e3 * (perf_counter() - begun))
        begun = perf_counter()
        assert all(store.has(some))
        asked.append(1e3 * (perf_counter() - begun))
        assert store.usage().parts == states
        listed.append(1e3 * (perf_counter() - begun))
        begun = perf_counter()
        store.catalog()
        read.append(1e3 * (perf_counter() - begun))
        store.close()
    yield Row(f"a folder with {states:,} states: opened", "ms", opened, "<= 1000")
    yield Row("512 lookups meanwhile", "ms", asked)
    yield Row("its files listed, beside the start", "ms", listed)
    yield Row("its headers read, at the first eviction", "ms", read)


def without_hits(model: Model, memory: int, root: Path, repeats: int, length: int, rng: random.Random) -> Rows:
    """Yield rows of prompts that share nothing, with a tier that gets each of their checkpoints and without."""
    with ExitStack() as stack:
        engines = {
            "no tier": stack.enter_context(tiered(model, memory, [])),
            "selective": stack.enter_context(tiered(model, memory, [DiskStore(root / "s", None)], through=False)),
            "through": stack.enter_context(tiered(model, memory, [DiskStore(root / "t", None)])),
        }

        spent, slowest = ({name: list[float]() for name in engines} for _ in range(2))  # CPU seconds; milliseconds
        steps = {name: timed_steps(engine) for name, engine in engines.items()}

        def seconds(name: str) -> float:
            engine, prompts = engines[name], [model.prompt(rng, length) for _ in range(COLD)]
            steps[name].clear()
            begun, computing = perf_counter(), time.process_time()
            for asked in [submit(engine, prompt, ANSWER) for prompt in prompts]:
                finished(asked)
            settle(engine)
            wall = perf_counter() - begun
            copied(engine)
            spent[name].append(time.process_time() - computing)
            slowest[name].append(1e3 * percentile(steps[name], 99))
            return wall

        work: dict[str, Callable[[], float]] = {name: partial(seconds, name) for name in engines}
        figures = measure.in_turns(work, repeats)
    yield Row(f"{COLD} cold prompts of {length:,} tokens, no tier", "s", figures["no tier"])
    for name in ("selective", "through"):
        yield Row(f"the same, disk, {name} / no tier", "x", ratios(figures[name], figures["no tier"]), "<= 1.02")
        cpu = ratios(spent[name][-repeats:], spent["no tier"][-repeats:])
        yield Row(f"its CPU time with all copies, {name} / no tier", "x", cpu, "<= 1.02")
    for name in engines:
        yield Row(f"a step beside copies, p99, {name}", "ms", slowest[name][-repeats:])


@contextmanager
def redis(root: Path) -> Iterator[str | None]:
    """A Redis server's URL; None if there is none here."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        yield None
        return
    path = root / "redis.sock"
    command = [binary, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(root)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while not path.exists():
                time.sleep(0.05)
            yield f"unix://{path}"
        finally:
            process.terminate()


def main() -> None:
    parser = measure.parser(__doc__, "tiers", repeats=3)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; without it, a random one")
    parser.add_argument("--dtype", default="auto", help="of --model")
    parser.add_argument("--device", default="cpu", choices=DEVICES, help="where the model computes")
    parser.add_argument("--length", type=int, default=32_768, help="tokens of the long prompt")
    parser.add_argument(
        "--folder", type=Path, help="where the disk tier is; without it, the system's for temporary files"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="questions to answer; all of them")
    given = measure.prepared(parser)
    rng, repeats = random.Random(given.seed), given.repeats
    length, turn = (SMALL_LENGTH, 128) if given.small else (given.length, 2048)
    sessions = (5, 128, 64) if given.small else (SESSIONS, BEGIN, GROWS)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.folder)))
        model = Model(given.model or stack.enter_context(bench_checkpoint()), given.dtype, device=given.device)
        url = stack.enter_context(redis(root))
        opened: dict[str, Opened] = {"no tier": list, "disk": lambda: [DiskStore(root / "set", None)]}
        if given.device != "cpu":
            opened["host memory"] = lambda: [MemoryStore(None)]
        if url is not None:
            opened["redis"] = lambda: [RedisStore(url, None)]
        parts = (
            lambda: restart(model, length, root, repeats, rng),
            lambda: choices(model, 1_000_000_000, root, repeats, (128,) if given.small else (128, 512, 2048), rng),
            lambda: working_set(model, opened, rng, *sessions),
            lambda: lost(model, root, rng, *sessions),
            lambda: start_up(root / "many", 300 if given.small else STATES, repeats, rng),
            lambda: without_hits(model, 1_000_000_000, root, repeats, turn, rng),
        )
        rows = [row for name, part in zip(PARTS, parts, strict=True) if name in given.parts for row in part()]
    of = given.model.name if given.model else "random"
    measure.report(given, rows, model=of, dtype=given.dtype, device=given.device)


if __name__ == "__main__":
    main()
