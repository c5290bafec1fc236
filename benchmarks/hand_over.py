"""Hand-overs of prompts from a worker that prefills to one that decodes: their tokens, parts and bytes.

    python -m benchmarks.hand_over [--tokens 512,2048,8192] [--model FOLDER] [--out FILE]

Both workers are in this process, with sockets as in a cluster, and a router is in front of them. Answers are decoded
meanwhile, so that prompts are prefilled apart. Counts alone are printed: they do not depend on what else the machine
does. Each answer is compared with that of a worker without a cache.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure import console, machine
from headwater.account import CacheAccount
from headwater.cli.common import prepare_outputs
from headwater.cli.router_process import router_of
from headwater.cluster.choice import Role
from headwater.cluster.curve import RouterKeys
from headwater.cluster.hosting import Host
from headwater.cluster.router import Router
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.events import Event, FailedEvent, FinishedEvent, TokenEvent
from headwater.models.embedded import embedded
from headwater.request import Generation, SamplingParams
from headwater.table import Table

OUT = Path(__file__).resolve().parent / "results" / "hand_over.json"
MEMORY = 400_000_000  # bytes of each worker
BESIDE = 3  # answers that are decoded meanwhile
ANSWER = 8  # tokens
PATIENCE = 120.0  # seconds


@dataclass
class Answer:
    """Tokens of an answer with their log probabilities, and its account."""

    tokens: list[tuple[int, float | None]] = field(default_factory=list)
    account: CacheAccount | None = None
    begun: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def on_event(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.tokens.append((event.token, event.logprob))
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


def hand_overs(config: ServeConfig, prompts: list[int]) -> tuple[list[dict[str, int]], list[Answer]]:
    """Return the counts of one hand-over for each length of a prompt, and the answers."""
    keys = RouterKeys.new()
    rows, answers = [], []
    with ExitStack() as stack:
        router = router_of(config, keys, "least_cost")
        router.start()
        stack.callback(router.stop)
        hosts = {}
        for role in (Role.PREFILL, Role.DECODE):
            hosts[role] = host = Host(config, keys.for_workers, lambda: "127.0.0.1", share_weights=False, role=role)
            stack.callback(host.stop)
            router.join(role.value, host.contact())
        assert router.wait_for(len(hosts), PATIENCE), "workers are missing"
        asked(router, asking(256, 2))  # the workers measure their speeds
        for tokens in prompts:
            beside = [Answer() for _ in range(BESIDE)]
            ids = [router.submit(asking(8, 4000, n), one.on_event) for n, one in enumerate(beside)]
            assert all(one.begun.wait(PATIENCE) for one in beside)
            time.sleep(0.3)  # the router hears of what runs
            parts, size = pulled(hosts[Role.DECODE])
            answer = asked(router, asking(tokens, ANSWER))
            list(map(router.cancel, ids))
            assert answer.account is not None, "it failed"
            after = pulled(hosts[Role.DECODE])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda text: [int(one) for one in text.split(",")], default=[512, 2048, 8192])
    parser.add_argument("--model", type=Path, default=embedded())
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    prepare_outputs(given.out)
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
    given.out.write_text(json.dumps({"run": machine(), "rows": rows}, indent=1) + "\n")
    if not all(row["same_bits"] for row in rows):
        raise SystemExit("an answer differs from that of one worker")
    if not all(row["apart"] for row in rows):
        raise SystemExit("a prompt was not prefilled apart: nothing was measured of it")


if __name__ == "__main__":
    main()
