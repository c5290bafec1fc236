"""Random requests to four engines, with and without drafts, with and without a cache: every answer must be the same.

    python -m stress.four_ways [--requests 10000] [--seed 0] [--family qwen3_5] [--embedded] [--dtype float32]

A small random model of a family, with a head of multi-token prediction if the family has one, or the embedded model.
Requests share beginnings; they are greedy or drawn, with penalties, constraints, stop strings, several choices, and
some are cancelled. Of a part of them a text like the answer is predicted. Every draft is verified, whether it pays or
not. The engines with a cache have memory for a few requests. Compared are tokens, texts, ends and log probabilities,
all bits of them; a difference is printed with its request, and the exit code is 1.

A tenth of as many requests is then sent one after the other to two more engines with as many pages, one of which
drafts: what each request has of the cache must be the same, too.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headwater.account import CacheAccount
from headwater.config import ServeConfig
from headwater.engine.assembly import draft_bytes
from headwater.engine.engine import Engine
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.engine.proof.verdict import verdict
from headwater.events import Event, FailedEvent, FinishedEvent, TokenEvent
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import LoadedModel, load_model, read_spec
from headwater.request import Constraint, Drafting, Generation, SamplingParams
from headwater.schedule.limits import EXTRA_SLOTS
from headwater.schedule.speculation import speculation_of
from stress.live_server import embedded_model
from tests import checkpoints
from tests.checkpoints.mtp import add_head
from tests.exactness.rig import verify_every_draft

PLENTY = 3000  # pages of an engine without a cache
RUNNING = 6  # requests at once
MAX_SUBMITTED = 12  # requests that are submitted: half of them wait
BATCH = 200  # requests whose answers are held
OF_HITS, MIN_HITS = 10, 12  # one request in OF_HITS is asked one at a time, and at least MIN_HITS
PATIENCE = 300  # seconds
FORM = {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["n", "ok"]}
CONSTRAINTS = (Constraint("json_schema", json.dumps(FORM)), Constraint("regex", "(ab|cd)+[0-9]{2,5}x"))


@dataclass(frozen=True)
class Drawn:
    """A request, and the number of tokens after which its client leaves, if it does."""

    generation: Generation
    leaves_after: int | None
    predicts: bool


@dataclass(eq=False)
class Answered:
    """Everything that a client has seen of an answer."""

    tokens: list[tuple[object, ...]] = field(default_factory=list)  # with their log probabilities
    text: str = ""
    end: tuple[str, object] | None = None
    error: str | None = None
    account: CacheAccount | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def seen(self, most: int | None) -> tuple[object, ...]:
        """Return the compared part: all of it, or the first tokens of a request whose client left."""
        if most is not None:
            return (self.tokens[:most], self.error)
        return (self.tokens, self.text, self.end, self.error)


def draw(rng: random.Random, beginnings: Sequence[tuple[int, ...]], vocabulary: int) -> Drawn:
    """Return a random request; the same generator draws the same one."""
    beginning = rng.choice(beginnings)
    tail = tuple(rng.randrange(3, vocabulary) for _ in range(rng.randint(1, 60)))
    greedy = rng.random() < 0.5
    params = SamplingParams(
        max_tokens=rng.choice((1, 3, 8, 16, 24, 40)),
        temperature=0.0 if greedy else rng.uniform(0.2, 1.3),
        top_k=rng.choice((0, 0, 20)),
        top_p=rng.choice((1.0, 1.0, 0.9)),
        seed=rng.randrange(2**32),
        choice=rng.choice((0, 0, 1, 2)),
        stop=rng.choice(((), (), ("e",), ("th", "ing"))),
        ignore_eos=rng.random() < 0.5,
        min_tokens=rng.choice((0, 0, 2)),
        logprobs=2,
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.0, 0.5)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.4)),
        logit_bias=rng.choice(((), (), ((rng.randrange(vocabulary), 4.0),))),
        constraint=rng.choice((None,) * 6 + CONSTRAINTS),
    )
    namespace = rng.choice(("", "", "other"))
    generation = Generation((*beginning, *tail), params, namespace, keep_output=rng.random() < 0.7)
    leaves = rng.randint(1, params.max_tokens) if rng.random() < 0.1 else None
    return Drawn(generation, leaves, rng.random() < 0.3)


def predicted(rng: random.Random, true: Answered) -> tuple[int, ...]:
    """Return an answer's tokens with one of them exchanged: right drafts, and then one that is wrong."""
    tokens = [int(str(token)) for token, *_ in true.tokens]
    if tokens:
        tokens[rng.randrange(len(tokens))] ^= 1
    return tuple(tokens)


def answers(engine: Engine, work: Sequence[Drawn]) -> list[Answered]:
    """Return the answers of all requests, at most MAX_SUBMITTED of them submitted at a time."""
    places = threading.BoundedSemaphore(MAX_SUBMITTED)
    found = [_submit(engine, one, places) for one in work]
    for answer in found:
        assert answer.ended.wait(PATIENCE), "no answer"
    return found


def _submit(engine: Engine, drawn: Drawn, places: threading.BoundedSemaphore) -> Answered:
    answer = Answered()
    known = threading.Event()
    ids: list[int] = []

    def end() -> None:
        if not answer.ended.is_set():
            answer.ended.set()
            places.release()

    def on_event(event: Event) -> None:
        if isinstance(event, TokenEvent):
            answer.tokens.append((event.token, event.logprob, event.top))
            answer.text += event.text
            if drawn.leaves_after is not None and len(answer.tokens) >= drawn.leaves_after:
                known.wait(PATIENCE)
                engine.cancel(ids[0])
                end()
        elif isinstance(event, FinishedEvent):
            answer.text += event.text
            answer.end, answer.account = (event.finish_reason, event.stop), event.account
            end()
        elif isinstance(event, FailedEvent):
            answer.error = f"{type(event.error).__name__}: {event.error}"
            end()

    assert places.acquire(timeout=PATIENCE), "no answer ended"
    ids.append(engine.submit(drawn.generation, on_event))
    known.set()
    return answer


@dataclass(eq=False)
class Comparison:
    """Four engines over one model, and the compared answers."""

    engines: dict[str, Engine]
    vocabulary: int
    seed: int
    compared: int = 0
    tokens: int = 0
    differences: list[str] = field(default_factory=list)
    hits: dict[str, int] = field(default_factory=dict)  # tokens of requests one after the other, of engines of a kind

    def run(self, requests: int) -> Iterator[int]:
        """Compare `requests` requests; yield how many were, after each batch."""
        rng = random.Random(self.seed)
        beginnings = [tuple(rng.randrange(3, self.vocabulary) for _ in range(n)) for n in (0, 30, 64, 130, 192, 260)]
        for first in range(0, requests, BATCH):
            numbers = range(first, min(requests, first + BATCH))
            self._compare(rng, [draw(rng, beginnings, self.vocabulary) for _ in numbers])
            yield self.compared

    def _compare(self, rng: random.Random, work: list[Drawn]) -> None:
        expected = answers(self.engines["neither"], work)
        work = [
            replace(one, generation=replace(one.generation, drafting=Drafting(prediction=predicted(rng, answer))))
            if one.predicts
            else one
            for one, answer in zip(work, expected, strict=True)
        ]
        for name in ("drafts and cache", "drafts", "cache"):
            for one, answer, true in zip(work, answers(self.engines[name], work), expected, strict=True):
                found, wanted = answer.seen(one.leaves_after), true.seen(one.leaves_after)
                if found != wanted:
                    self.differences.append(f"{name}: {found}, not {wanted}, of {one}")
        self.compared += len(work)
        self.tokens += sum(len(answer.tokens) for answer in expected)


def four_engines(stack: ExitStack, loaded: LoadedModel, check: SelfCheck, drafts: str) -> dict[str, Engine]:
    """Return started engines, which `stack` stops: with drafts and a cache, with one of them, and with neither."""
    pages = pages_of(loaded)
    kinds: dict[str, dict[str, Any]] = {
        "drafts and cache": {"memory": pages, "speculation": drafts},
        "drafts": {"memory": PLENTY, "speculation": drafts, "cache": False},
        "cache": {"memory": pages},
        "neither": {"memory": PLENTY, "cache": False},
    }
    engines = {}
    for name, settings in kinds.items():
        memory = settings.pop("memory") * loaded.spec.page_bytes
        engine = Engine.over(loaded, check, ServeConfig(memory=memory, max_running=RUNNING, **settings))
        verify_every_draft(engine.scheduler.speculation)
        engine.start()
        stack.callback(engine.stop)
        engines[name] = engine
    return engines


def pages_of(loaded: LoadedModel) -> int:
    """Return the pages of an engine with a cache: far fewer than its requests would fill."""
    return RUNNING * (2 * loaded.spec.checkpoint_pages + 6)


def two_engines(stack: ExitStack, loaded: LoadedModel, check: SelfCheck, drafts: str) -> dict[str, Engine]:
    """Return started engines, which `stack` stops, with a cache of as many pages: with drafts and without."""
    spec, kept = loaded.spec, draft_bytes(loaded.spec, RUNNING + EXTRA_SLOTS, speculation_of(drafts))
    beside = 0 if loaded.mtp is None else spec.mtp_page_bytes
    memory = {"off": pages_of(loaded) * spec.page_bytes, drafts: pages_of(loaded) * (spec.page_bytes + beside) + kept}
    engines = {}
    for name, size in memory.items():
        config = ServeConfig(memory=size, max_running=RUNNING, speculation=name)
        engine = engines[name] = Engine.over(loaded, check, config)
        verify_every_draft(engine.scheduler.speculation)
        engine.start()
        stack.callback(engine.stop)
    assert len({engine.scheduler.layout.n_pages for engine in engines.values()}) == 1
    return engines


def compare_hits(run: Comparison, engines: dict[str, Engine], requests: int) -> None:
    """Ask both engines one request after the other, and note the cached tokens of their prompts."""
    rng = random.Random(run.seed + 1)
    beginnings = [tuple(rng.randrange(3, run.vocabulary) for _ in range(n)) for n in (0, 64, 130, 260)]
    work = [replace(draw(rng, beginnings, run.vocabulary), leaves_after=None) for _ in range(requests)]
    accounts: dict[str, list[CacheAccount | None]] = {}
    for name, engine in engines.items():
        accounts[name] = []
        for one in work:
            accounts[name].append(answers(engine, [one])[0].account)
            engine.drain(PATIENCE)
        run.hits[name] = sum(account.cached_tokens for account in accounts[name] if account is not None)
    off, drafting = accounts.values()
    for one, plain, found in zip(work, off, drafting, strict=True):
        if plain != found:
            run.differences.append(f"hits: {found}, not {plain}, of {one}")


def random_model(root: Path, family: str, dtype: str) -> tuple[LoadedModel, SelfCheck]:
    """Return a small random model of a family, with a head if the family has one."""
    folder = checkpoints.checkpoint(root, family)
    if read_spec(folder, dtype).mtp is not None:
        add_head(folder)
    check = verdict(read_spec(folder, dtype))
    numerics.use(Numerics(check.mode))
    return load_model(folder, dtype, mtp=read_spec(folder, dtype).mtp is not None), check


def compare(requests: int, seed: int, loaded: LoadedModel, check: SelfCheck) -> Comparison:
    """Compare, report."""
    begun = time.monotonic()
    with ExitStack() as stack:
        engines = four_engines(stack, loaded, check, "auto")
        run = Comparison(engines, min(loaded.spec.vocab_size, loaded.tokenizer.get_vocab_size()), seed)
        for done in run.run(requests):
            seconds = time.monotonic() - begun
            print(f"{done:,} requests, {len(run.differences)} differences, {seconds:.0f} s", flush=True)
        for name, engine in engines.items():
            engine.drain(PATIENCE)
            engine.scheduler.cache.check()
            stats, cache = engine.stats(), engine.scheduler.cache.stats()
            print(
                f"{name}: {cache.resumes:,} requests resumed, {sum(cache.evictions_by_kind().values()):,} evictions, "
                f"{stats.preemptions:,} preemptions, {stats.accepted_drafts:,} drafts accepted, "
                f"{stats.rejected_drafts:,} rejected"
            )
        alone = max(MIN_HITS, requests // OF_HITS)
        compare_hits(run, two_engines(stack, loaded, check, "auto"), alone)
    hits = ", ".join(f"{name} {tokens:,}" for name, tokens in run.hits.items())
    print(f"{alone:,} requests one after the other, in as many pages; tokens of hits: {hits}")
    for difference in run.differences[:5]:
        print(f"DIFFERENCE {difference}")
    print(
        f"{run.compared:,} requests, {run.tokens:,} tokens, four ways: {len(run.differences)} differences, seed {seed}"
    )
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", default="qwen3_5", metavar="NAME", choices=sorted(checkpoints.RECIPES))
    parser.add_argument("--embedded", action="store_true", help="the embedded model instead of a random one")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    prepare_process(2)
    with tempfile.TemporaryDirectory() as root:
        model = embedded_model(given.dtype) if given.embedded else random_model(Path(root), given.family, given.dtype)
        run = compare(given.requests, given.seed, *model)
    sys.exit(bool(run.differences))


if __name__ == "__main__":
    main()
