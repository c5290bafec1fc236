"""Comparison of servers on the same work over HTTP, in turns: this tree, other trees, llama.cpp, vLLM.

    python -m benchmarks.peers --model FOLDER --peers FOLDER --threads 2 "NAME=WHERE MODEL [FLAGS]" ...

Each server is a name, the folder of a source tree of Headwater (or `llama.cpp`, `vllm`), the model that it serves, and
flags of its own (of `headwater serve` for a tree). All of them stay up, and every figure is taken of one after the
other, each turn beginning with another one. `--model` holds the tokenizer of all models. Without servers, this tree
serves it alone.

Figures: TTFT of prompts never seen (cold) and of the same prompts sent again; output tokens a second of several
streams after distinct cached prompts, while all of them run; how long /health takes while as many prompts never seen
are computed and answered; resident memory. Peers are started by `serve/run_peer.py`
in the folder of peers, in the environments that VENV_LLAMACPP and VENV_VLLM name.
"""

from __future__ import annotations

import argparse
import importlib
import random
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenizers import Tokenizer

from benchmarks import measure
from benchmarks.engines import bench_checkpoint
from benchmarks.measure import TICKS, Figures, Row, ratios
from benchmarks.servers import Streamed, complete, health_seconds, serve, status_mb
from headwater.percentile import percentile
from tests.checkpoints.tokenizer import sayable

ROOT = Path(__file__).parents[1]
PEERS = {"llama.cpp": "llamacpp", "vllm": "vllm"}  # what run_peer.py calls them
MEMORY = 2  # GB of cache for each server
IDLE, PAUSE, PATIENCE = 0.03, 0.25, 120  # CPU seconds within a pause of a server that is idle; seconds
ASKED_EVERY = 0.02  # seconds between questions of whether a server is healthy


@dataclass(frozen=True)
class Wanted:
    """A server as the command line names it: `NAME=WHERE MODEL [FLAGS]`."""

    name: str
    where: str
    model: Path
    flags: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Wanted:
        """Raises ArgumentTypeError for a text of another form."""
        name, _, rest = text.partition("=")
        words = shlex.split(rest)
        if len(words) < 2:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=WHERE MODEL [FLAGS]")
        return cls(name, words[0], Path(words[1]), tuple(words[2:]))


@dataclass
class Running:
    """A server that is up, and the prompts that it has had."""

    name: str
    command: str
    port: int
    is_ours: bool
    pids: Callable[[], list[int]]  # of its processes
    rng: random.Random  # the same for every server
    words: list[int]
    last: dict[int, list[int]] = field(default_factory=dict)  # cold prompts by length

    def prompt(self, n_tokens: int) -> list[int]:
        return self.rng.choices(self.words, k=n_tokens)

    def settle(self) -> None:
        """Wait until the process is idle: work after an answer belongs to no figure. Raises TimeoutError."""
        deadline, before = time.perf_counter() + PATIENCE, self._cpu_seconds()
        while time.perf_counter() < deadline:
            time.sleep(PAUSE)
            now = self._cpu_seconds()
            if now - before < IDLE:
                return
            before = now
        raise TimeoutError(f"{self.name} was not idle within {PATIENCE} seconds")

    def resident_mb(self, field_: str) -> float:
        """Resident memory of all of the server's processes; pages that they share count for each."""
        return sum(status_mb(pid, field_) for pid in self.pids())

    def _cpu_seconds(self) -> float:
        ticks = 0
        for pid in self.pids():
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
        return ticks / TICKS

    def cold(self, n_tokens: int) -> float:
        """Milliseconds to the first token of a prompt never seen."""
        self.last[n_tokens] = self.prompt(n_tokens)
        answer = self.ask(self.last[n_tokens])
        if cached_of(answer) > n_tokens // 10:
            raise RuntimeError(f"{self.name}: {cached_of(answer):,} of {n_tokens:,} tokens never seen were cached")
        return 1e3 * answer.ttft

    def resend(self, n_tokens: int) -> float:
        """Milliseconds to the first token of the last cold prompt of this length, sent again."""
        answer = self.ask(self.last[n_tokens])
        if cached_of(answer) < n_tokens - 64:
            raise RuntimeError(f"{self.name}: {cached_of(answer):,} of {n_tokens:,} tokens sent again were cached")
        return 1e3 * answer.ttft

    def streams(self, prompts: list[list[int]], n_outputs: int) -> float:
        """Output tokens a second of all streams together, from the last one's first token to the first one's last."""
        for prompt in prompts:
            self.ask(prompt)
        with ThreadPoolExecutor(len(prompts)) as clients:
            answers = list(clients.map(lambda prompt: complete(self.port, prompt, n_outputs), prompts))
        self.settle()
        times = [answer.times[0] for answer in answers]
        begun, end = max(t[0] for t in times), min(t[-1] for t in times)
        if end <= begun:
            raise RuntimeError(f"{self.name}: {len(prompts)} answers of {n_outputs} tokens did not overlap")
        chunks = sum(begun < t <= end for of_stream in times for t in of_stream)
        return chunks * n_outputs * len(prompts) / sum(map(len, times)) / (end - begun)

    def health(self, n_streams: int, n_tokens: int, n_outputs: int) -> float:
        """Milliseconds within which /health answers 99 times of 100 beside streams after prompts never seen."""
        times = []
        with ThreadPoolExecutor(n_streams) as clients:
            prompts = [self.prompt(n_tokens) for _ in range(n_streams)]
            answers = [clients.submit(complete, self.port, prompt, n_outputs) for prompt in prompts]
            while not all(answer.done() for answer in answers):
                times.append(1e3 * health_seconds(self.port))
                time.sleep(ASKED_EVERY)
        for answer in answers:
            answer.result()
        self.settle()
        return percentile(times, 99)

    def ask(self, prompt: list[int], n_outputs: int = 1) -> Streamed:
        """Return the answer, when the server is idle again. Raises TimeoutError."""
        answer = complete(self.port, prompt, n_outputs)
        self.settle()
        return answer


def cached_of(answer: Streamed) -> int:
    """Prompt tokens that were cached, as the server reports them."""
    return int((answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


@contextmanager
def started(wanted: Wanted, given: argparse.Namespace, words: list[int]) -> Iterator[Running]:
    """Run a server until the block ends."""
    of = partial(Running, wanted.name, rng=random.Random(given.seed), words=words)
    if wanted.where in PEERS:
        with _peer(wanted, given) as (peer, port):
            yield of(shlex.join(map(str, peer.cmd)), port, is_ours=False, pids=peer.pids)
        return
    flags = ("--threads", str(given.threads), "--memory", f"{MEMORY}GB", *wanted.flags)
    environment = {"PYTHONPATH": str(Path(wanted.where).resolve() / "src"), "OMP_NUM_THREADS": str(given.threads)}
    with serve(str(wanted.model), *flags, environment=environment) as serving:
        before = " ".join(f"{name}={value}" for name, value in environment.items())
        command = f"{before} {shlex.join(map(str, serving.process.args))}"
        yield of(command, serving.port, is_ours=True, pids=lambda: [serving.process.pid])


@contextmanager
def _peer(wanted: Wanted, given: argparse.Namespace) -> Iterator[tuple[Any, int]]:
    options = {"threads": given.threads, "ctx": given.slot, "cache_gb": MEMORY, "extra": wanted.flags}
    options["parallel"] = max(given.streams, default=1)
    log = given.out.with_suffix(f".{wanted.name}.log")
    with started_peer(given.peers, PEERS[wanted.where], wanted.model, log, **options) as running:
        yield running
    log.unlink()


@contextmanager
def started_peer(folder: Path, kind: str, model: Path, log: Path, **options: Any) -> Iterator[tuple[Any, int]]:
    """Run a peer on a free port, by `run_peer.py` of the folder of peers, until the block ends; return it and the port.

    Raises SystemExit if it does not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with peer_runner(folder).Peer(kind, model, port=port, log=str(log), **options) as peer:
        yield peer, port


def peer_runner(folder: Path) -> ModuleType:
    """Import `serve/run_peer.py` of the folder of peers."""
    if (serving := str(folder / "serve")) not in sys.path:
        sys.path.insert(0, serving)
    return importlib.import_module("run_peer")


def work_of(given: argparse.Namespace, prompts: list[list[int]]) -> dict[tuple[str, str], Callable[[Running], float]]:
    """Return functions from a server to a figure, by (name, unit), in the order in which they are taken."""
    work: dict[tuple[str, str], Callable[[Running], float]] = {}
    for n in given.cold:
        work[f"cold TTFT, {n:,} tokens", "ms"] = partial(Running.cold, n_tokens=n)
    for n in given.cold:
        work[f"TTFT of the same {n:,} tokens again", "ms"] = partial(Running.resend, n_tokens=n)
    for k in given.streams:
        name = f"{k} stream{'s' * (k > 1)} of {given.outputs} tokens after {given.prompt:,} cached ones"
        work[name, "tokens/s"] = partial(Running.streams, prompts=prompts[:k], n_outputs=given.outputs)
    if given.streams:
        k = max(given.streams)
        name = f"p99 of /health beside {k} streams after {given.prompt:,} tokens never seen"
        work[name, "ms"] = partial(Running.health, n_streams=k, n_tokens=given.prompt, n_outputs=given.outputs)
    return work


def rows_of(servers: Sequence[Running], given: argparse.Namespace, prompts: list[list[int]]) -> list[Row]:
    rows = []
    for server in servers:
        server.streams([server.prompt(64)], 8)
    for (name, unit), figure in work_of(given, prompts).items():
        work = {server.name: partial(figure, server) for server in servers}
        figures = measure.in_turns(work, given.repeats, warm_up=False)
        print(f"{name}, {unit}: {figures}", flush=True)
        rows += [Row(f"{name}: {server}", unit, values) for server, values in figures.items()]
        rows += compared(name, unit, figures)
    for field_, what in (("VmRSS", "resident at the end"), ("VmHWM", "resident at its peak")):
        rows += [Row(f"{what}: {server.name}", "MB", [server.resident_mb(field_)]) for server in servers]
    return rows


def compared(name: str, unit: str, figures: Figures) -> Iterator[Row]:
    """Yield how many times as fast as each other server the first one is, turn by turn."""
    first, *others = figures
    for other in others:
        faster = (first, other) if unit == "tokens/s" else (other, first)
        yield Row(f"{name}: {first} / {other}, speed", "x", ratios(*(figures[server] for server in faster)))


def markdown(rows: list[Row], servers: Sequence[str]) -> str:
    """Return a table of medians with [least, most], a row for each figure and a column for each server."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        name, _, server = row.name.rpartition(": ")
        if server in servers:
            least, most = min(row.values), max(row.values)
            spread = f" [{measure.shown(least)}, {measure.shown(most)}]" if least < most else ""
            cells.setdefault((name, row.unit), {})[server] = measure.shown(row.median) + spread
    lines = [f"| | {' | '.join(servers)} |", "| --- |" + " --- |" * len(servers)]
    for (name, unit), of in cells.items():
        lines.append(f"| {name}, {unit} | {' | '.join(of.get(server, '') for server in servers)} |")
    return "\n".join(lines)


def servers_parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser of the servers, and of what starts them."""
    parser = measure.parser(doc, name, repeats=3)
    parser.add_argument("servers", nargs="*", type=Wanted.read, metavar="NAME=WHERE MODEL [FLAGS]")
    parser.add_argument("--model", type=Path, help="folder with the tokenizer of all models")
    parser.add_argument("--peers", type=Path, help="folder whose serve/run_peer.py starts peers")
    parser.add_argument("--slot", type=int, default=16384, help="longest sequence of a peer, tokens")
    parser.set_defaults(streams=())
    return parser


def servers_read(parser: argparse.ArgumentParser) -> argparse.Namespace:
    given = measure.prepared(parser)
    for wanted in given.servers:
        if wanted.where in PEERS and given.peers is None:
            parser.error(f"{wanted.where} needs --peers")
    if given.servers and given.model is None:
        parser.error("servers need --model, which holds their tokenizer")
    return given


@contextmanager
def all_started(given: argparse.Namespace) -> Iterator[tuple[list[Running], Tokenizer, Path]]:
    """Run all servers until the block ends; by default this tree's, over a random checkpoint."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as SIGINT: servers are ended
    with ExitStack() as stack:
        model = given.model or stack.enter_context(bench_checkpoint())
        wanted = given.servers or [Wanted("headwater", str(ROOT), model, ())]
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        words = sayable(tokenizer)
        yield [stack.enter_context(started(one, given, words)) for one in wanted], tokenizer, model


def report(given: argparse.Namespace, rows: list[Row], servers: Sequence[Running], **settings: object) -> None:
    """Write and print the rows, and a table with a column for each server."""
    commands = {server.name: server.command for server in servers}
    named = {name: without_folders(command) for name, command in commands.items()}
    measure.report(given, rows, commands=named, **settings)
    print(*(f"{name}: {command}" for name, command in commands.items()), sep="\n")
    print(f"{measure.machine()['cpu']}, {given.threads} threads\n{markdown(rows, list(commands))}")


def without_folders(command: str) -> str:
    """Return a command with the last name of each absolute path only: the others are those of a machine."""
    return re.sub(r"(?<![\w.])/[^\s\"']*/(?=[^\s\"'/])", "", command)


def options() -> argparse.Namespace:
    parser = servers_parser(__doc__, "peers")
    parser.add_argument("--cold", type=measure.numbers, default=(512, 2048, 4096), help="lengths of prompts, tokens")
    parser.add_argument("--streams", type=measure.numbers, default=(1, 8), help="numbers of streams at once")
    parser.add_argument("--prompt", type=int, default=512, help="tokens that are cached before a stream")
    parser.add_argument("--outputs", type=int, default=256, help="tokens of a stream")
    given = servers_read(parser)
    if given.small:
        given.cold, given.prompt, given.outputs = (128,), 64, 16
    return given


def main() -> None:
    given = options()
    with all_started(given) as (servers, _, model):
        rng, words = random.Random(given.seed + 1), servers[0].words
        prompts = [rng.choices(words, k=given.prompt) for _ in range(max(given.streams, default=0))]
        rows = rows_of(servers, given, prompts)
    report(given, rows, servers, model=model.name)


if __name__ == "__main__":
    main()
