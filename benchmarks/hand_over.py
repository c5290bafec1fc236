"""Hand-overs of prompts from a worker that prefills to one that decodes: their tokens, parts and bytes.

    python -m benchmarks.hand_over [--tokens 512,2048,8192] [--model FOLDER] [--out FILE]
    python -m benchmarks.hand_over --link 2MB/s --repeats 5 --tokens 8192

Both workers are in this process, with sockets as in a cluster, and a router is in front of them. Answers are decoded
meanwhile, so that prompts are prefilled apart. Counts do not depend on what else the machine does. Each answer is
compared with that of a worker without a cache.

With `--link` seconds are measured, too: to the first token, from that to the second, and the longest pause of the
answers beside it. The prompt is prefilled where it is decoded, by one of two workers without roles; or apart, and
pulled after its prefill has ended; or apart, and read meanwhile. The three take turns. The link is emulated: a worker
that sends a part sleeps for its bytes at that speed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.measure import console, machine
from headwater.account import CacheAccount
from headwater.cli.common import prepare_outputs
from headwater.cli.router_process import router_of
from headwater.cluster.cost import Role
from headwater.cluster.encryption import RouterKeys
from headwater.cluster.hosting import Host
from headwater.cluster.router import Router
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.events import Event, FailedEvent, FinishedEvent, TokenEvent
from headwater.lab.setup import Network
from headwater.models.files import embedded
from headwater.request import Generation, SamplingParams
from headwater.schedule.prefill_seconds import PrefillSpeed
from headwater.table import Table
from headwater.tiers.part import Buffer
from papers.results import refuse_dirty_tree, write_results

OUT = Path(__file__).resolve().parent / "results" / "hand_over.json"
MEMORY = 400_000_000  # bytes of each worker
BESIDE = 3  # answers that are decoded meanwhile
ANSWER = 8  # tokens
PATIENCE = 120.0  # seconds
SPEED = PrefillSpeed(0.0, 0.001)  # a millisecond a token, while hand-overs are counted
APART, TOGETHER = (Role.PREFILL, Role.DECODE), (Role.BOTH, Role.BOTH)
Sealed = Callable[..., AbstractContextManager[Sequence[Buffer] | None]]
WAYS = "together", "pulled after", "read meanwhile"


@dataclass
class Answer:
    """Tokens of an answer with their log probabilities, and its account."""

    tokens: list[tuple[int, float | None]] = field(default_factory=list)
    account: CacheAccount | None = None
    begun: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    times: list[float] = field(default_factory=list)  # of tokens, in seconds

    def on_event(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.tokens.append((event.token, event.logprob))
            self.times.append(time.perf_counter())
            self.begun.set()
        if isinstance(event, FinishedEvent):
            self.account = event.account
        if isinstance(event, FinishedEvent | FailedEvent):
            self.ended.set()


def asking(tokens: int, answer: int, seed: int = 0) -> Generation:
    """Return a request with a random prompt."""
    prompt = random.Random(f"{tokens} {seed}").choices(range(1000), k=tokens)
    return Generation(tuple(prompt), SamplingParams(max_tokens=answer, seed=seed, logprobs=0, ignore_eos=True))


def asked(router: Router | Engine, generation: Generation) -> Answer:
    """Return the whole answer to a request."""
    answer = Answer()
    router.submit(generation, answer.on_event)
    assert answer.ended.wait(PATIENCE), "no answer"
    return answer


def pulled(host: Host) -> tuple[int, int]:
    """Return the parts that a worker has pulled, and their bytes."""
    (peers,) = host._engine.stats().tiers
    return peers.read, peers.bytes_read


@dataclass
class Cluster:
    """A router, and two workers."""

    router: Router
    hosts: dict[Role, Host]

    def fix_speeds(self) -> None:
        """Let workers compute a token in SPEED: by measured speeds not all is handed over on a busy machine."""
        for host in self.hosts.values():
            engine, backlog = host._engine, host._engine.backlog
            engine.backlog = lambda own=backlog: replace(own(), prefill=SPEED)  # type: ignore[method-assign]
            engine.scheduler.tiers.prefill_seconds = lambda tokens: SPEED.token * tokens  # type: ignore[attr-defined]
        until = time.monotonic() + PATIENCE
        while any(link.backlog.prefill != SPEED for link in self.router.links.values()):
            assert time.monotonic() < until, "no heartbeat"
            time.sleep(0.01)

    @contextmanager
    def beside(self) -> Iterator[list[Answer]]:
        """Let answers be decoded meanwhile."""
        answers = [Answer() for _ in range(BESIDE)]
        ids = [self.router.submit(asking(8, 4000, n), one.on_event) for n, one in enumerate(answers)]
        assert all(one.begun.wait(PATIENCE) for one in answers)
        time.sleep(0.3)  # heartbeats report the running requests to the router
        yield answers
        list(map(self.router.cancel, ids))


@contextmanager
def cluster(config: ServeConfig, roles: tuple[Role, Role]) -> Iterator[Cluster]:
    keys = RouterKeys.new()
    with ExitStack() as stack:
        router = router_of(config, keys, "least_cost")
        router.start()
        stack.callback(router.stop)
        hosts = {}
        for number, role in enumerate(roles):
            hosts[role] = host = Host(config, keys.for_workers, lambda: "127.0.0.1", share_weights=False, role=role)
            stack.callback(host.stop)
            router.join(f"{role.value} {number}", host.contact())
        assert router.wait_for(len(roles), PATIENCE), "workers are missing"
        for n in range(2):
            asked(router, asking(256, 2, n))  # the workers measure their speeds
        yield Cluster(router, hosts)


def hand_overs(config: ServeConfig, prompts: list[int]) -> tuple[list[dict[str, int]], list[Answer]]:
    """Return the counts of one hand-over for each length of a prompt, and the answers."""
    rows, answers = [], []
    with cluster(config, APART) as running:
        running.fix_speeds()
        for tokens in prompts:
            with running.beside():
                parts, size = pulled(running.hosts[Role.DECODE])
                answer = asked(running.router, asking(tokens, ANSWER))
            assert answer.account is not None, "it failed"
            after = pulled(running.hosts[Role.DECODE])
            had = answer.account.handed_over_tokens
            apart = answer.account.prefilled_by is not None
            counts = {
                "prompt": tokens,
                "apart": int(apart),
                "handed_over": had,
                "computed_again": tokens - had if apart else 0,
            }
            rows.append({**counts, "parts": after[0] - parts, "bytes": after[1] - size})
            answers.append(answer)
    return rows, answers


# -- seconds


def bandwidth(link: str) -> float:
    """Return the bytes a second of a speed such as 2MB/s. Raises ConfigError."""
    network = Network.read(link)
    assert network is not None, "a link has a speed"
    return network.bandwidth


def slow(host: Host, link: float) -> None:
    """Let a worker send parts at so many bytes a second."""
    assert host._pulling is not None
    parts = host._pulling.sending.parts

    def slowed(sealed: Sealed) -> Sealed:
        @contextmanager
        def sealing(*asked: Any) -> Iterator[Sequence[Buffer] | None]:
            with sealed(*asked) as pieces:
                time.sleep(sum(map(len, pieces or ())) / link)
                yield pieces

        return sealing

    parts.sealed = slowed(parts.sealed)  # type: ignore[method-assign]


def timed(config: ServeConfig, prompts: list[int], link: float, repeats: int) -> list[dict[str, object]]:
    """Return the seconds of each request, by length and by the way that it was computed."""
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        ways = {}
        for way in WAYS:
            ways[way] = running = stack.enter_context(cluster(config, TOGETHER if way == WAYS[0] else APART))
            if way == WAYS[0]:
                continue
            slow(running.hosts[Role.PREFILL], link)
            if way == WAYS[1]:
                running.hosts[Role.DECODE]._engine.follow = lambda *given: 0  # type: ignore[method-assign]
        for number in range(repeats):
            for tokens in prompts:
                for way, running in ways.items():
                    with running.beside() as others:
                        begun = time.perf_counter()
                        answer = asked(running.router, asking(tokens, ANSWER, number))
                        ended = time.perf_counter()
                    assert answer.account is not None, "it failed"
                    assert (answer.account.prefilled_by is None) == (way == WAYS[0]), f"not {way}"
                    first, second = (at - begun for at in answer.times[:2])
                    during = [[begun, *(at for at in one.times if begun < at < ended), ended] for one in others]
                    pause = max(later - at for times in during for at, later in pairwise(times))
                    rows.append({"prompt": tokens, "way": way, "first": first, "gap": second - first, "pause": pause})
    return rows


def show_seconds(rows: list[dict[str, object]], link: str) -> None:
    """Print the medians, with the least and the most."""
    shown = Table(f"seconds, with a link of {link}", ("prompt", "way"), ("1st token", "to the 2nd", "pause"))
    for prompt, way in dict.fromkeys((row["prompt"], row["way"]) for row in rows):
        found = [row for row in rows if (row["prompt"], row["way"]) == (prompt, way)]
        columns = ([float(str(row[name])) for row in found] for name in ("first", "gap", "pause"))
        shown.add_row(f"{prompt:,}", str(way), *map(spread, columns))
    console().print(shown)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda text: [int(one) for one in text.split(",")], default=[512, 2048, 8192])
    parser.add_argument("--model", type=Path, default=embedded())
    parser.add_argument("--link", default="", help="speed such as 2MB/s")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    prepare_outputs(given.out)
    refuse_dirty_tree(given.out)
    config = ServeConfig(model=given.model, memory=MEMORY, log_format="text")
    rows, answers = hand_overs(config, given.tokens)
    plain = Engine.load(ServeConfig(model=given.model, memory=MEMORY, cache=False))
    plain.start()
    alone = [asked(plain, asking(tokens, ANSWER)) for tokens in given.tokens]
    plain.stop()
    shown = Table(
        f"hand-overs, {given.model.name}",
        ("prompt",),
        ("apart", "handed over", "computed again", "parts", "bytes", "same bits"),
    )
    for row, ours, theirs in zip(rows, answers, alone, strict=True):
        row["same_bits"] = int(ours.tokens == theirs.tokens)
        shown.add_row(*(f"{value:,}" for value in row.values()))
    console().print(shown)
    found: dict[str, object] = {"run": machine(), "rows": rows}
    if given.link:
        seconds = timed(config, given.tokens, bandwidth(given.link), given.repeats)
        show_seconds(seconds, given.link)
        found |= {"link": given.link, "seconds": seconds}
    write_results(given.out, found, seed=0)
    if not all(row["same_bits"] for row in rows):
        raise SystemExit("an answer differs from that of one worker")
    if not all(row["apart"] for row in rows):
        raise SystemExit("a prompt was not prefilled apart: nothing was measured of it")


if __name__ == "__main__":
    main()
