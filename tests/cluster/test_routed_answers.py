"""Real engines behind a router: requests go to the worker that has their prefix, and answers outlive their worker."""

import random
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from headwater.cluster import publisher
from headwater.cluster.cost import Role, RoundRobin
from headwater.cluster.hosting import info_of, prepares
from headwater.cluster.picture import Follower
from headwater.cluster.publisher import Publishing
from headwater.cluster.pulling import Pulling, own_security
from headwater.cluster.router import RoutedModel, Router
from headwater.cluster.worker import Pool, Worker
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.engine.meter import Backlog
from headwater.events import FinishedEvent, TokenEvent
from headwater.request import Constraint, Fidelity, Generation, SamplingParams, Span
from headwater.schedule.prefill_seconds import PrefillSpeed
from headwater.tiers.disk import DiskStore
from headwater.tiers.fingerprint import Fingerprint
from tests.cluster.fake import LONG, Received, kill, until
from tests.exactness.rig import words

ANYWHERE = "tcp://127.0.0.1:*"
KEY = bytes(32)
EVENTS = ServeConfig(
    kv_events=True,
    kv_events_endpoint=ANYWHERE,
    kv_events_replay_endpoint=ANYWHERE,
    tier_timeout=60,  # pulls are not late on a busy machine
)
PROMPT = words(150, "routed")
KINDS = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "drawn": {"temperature": 1.1, "seed": 5, "top_p": 0.9, "logprobs": 3},
    "penalties": {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 0},
    "pattern": {"temperature": 0.7, "seed": 7, "constraint": Constraint("regex", "(ab|cd)+[0-9]{9}x"), "logprobs": 1},
    "prompt scores": {"temperature": 0, "logprobs": 1, "prompt_logprobs": 2},
}


class Whole(Received):
    """Events that a client got, all of them kept."""

    def __init__(self) -> None:
        super().__init__()
        self.events = []

    def on_event(self, event) -> None:
        self.events.append(event)
        super().on_event(event)

    @property
    def comparable(self) -> list[object]:
        """Everything but the account, and the time in the queue: those are of the worker that ended the answer."""
        end = [(e.finish_reason, e.text, e.output_tokens, e.stop) for e in self.events if isinstance(e, FinishedEvent)]
        return [*(event for event in self.events if not isinstance(event, FinishedEvent)), *end]


class RealWorker:
    """An engine of its own over a shared model, and its worker; with a folder, it stores each checkpoint there."""

    def __init__(
        self, model, fingerprint: str = "one", role: Role = Role.BOTH, pages: int = 600, folder: Path | None = None
    ) -> None:
        loaded, check = model
        config = replace(EVENTS, memory=pages * loaded.spec.page_bytes, tier_store="through")
        self.engine = Engine.over(loaded, check, config)
        incarnation, own = uuid.uuid4().bytes, Fingerprint.of({"probe": fingerprint})
        if folder is not None:
            self.engine.use_tiers([DiskStore(folder, None)], KEY, own, config)
        self.publishing = Publishing(config, KEY)
        self.engine.stepped = self.publishing.start(self.engine.scheduler.cache, self.engine.own_tiers)
        self.pulling = Pulling(self.engine, KEY, own, config, incarnation, ANYWHERE, own_security())
        parts = self.pulling.contact
        info = info_of(self.engine, fingerprint, config.max_running, self.publishing.addresses, parts, role)
        pool = Pool(self.pulling.know, prepares(self.engine))
        self.worker = Worker(self.engine, info, incarnation, ANYWHERE, LONG, pool=pool)
        self.engine.start()
        self.pulling.start()
        self.worker.start()

    def kill(self) -> None:
        self.worker._send_answers = lambda: None
        self.worker.close()

    def close(self) -> None:
        self.engine.stop()
        if self.worker._thread.is_alive():
            self.worker.close()
        self.pulling.close()
        self.publishing.close()


@contextmanager
def cluster(
    model, pages: int = 600, folder: Callable[[str], Path | None] = lambda name: None, **kinds: str | Role
) -> Iterator[tuple[Router, dict[str, RealWorker]]]:
    """Yield a router, and workers by name: each of a fingerprint, or of one fingerprint and a role.

    `folder`: of each worker's tier.
    """
    with ExitStack() as stack:
        loaded = model[0]
        texts = loaded.tokenizer, loaded.chat_template, loaded.special_tokens, loaded.generation
        texts = RoutedModel("real", *texts, loaded.spec)
        router = Router(texts, KEY, patience=5.0, heartbeat_timeout=LONG)
        router.start()
        stack.callback(router.stop)
        workers = {}
        for name, kind in kinds.items():
            given = ("one", kind) if isinstance(kind, Role) else (kind, Role.BOTH)
            workers[name] = RealWorker(model, *given, pages, folder(name))
            stack.callback(workers[name].close)
            router.join(name, workers[name].worker.contact)
        until(lambda: len(router.links.infos) == len(kinds))
        until(lambda: all(link.follower and link.follower.picture.is_whole for link in router.links.values()))
        yield router, workers


def ask(router, generation: Generation) -> Whole:
    received = Whole()
    router.submit(generation, received.on_event)
    return received


def generation(kind: str, prompt=PROMPT, max_tokens: int = 60, **more) -> Generation:
    params = {"max_tokens": max_tokens, "ignore_eos": True, **KINDS[kind]}
    return Generation(tuple(prompt), SamplingParams(**params), **more)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_whose_worker_is_lost_has_the_same_bits(model, kind: str) -> None:
    with cluster(model, a="one", b="one") as (router, workers):
        alone = ask(router, generation(kind)).wait()
        assert alone.error is None
        half = len(alone.tokens) // 2
        again = lost_after(half, router, workers, generation(kind))
        assert router.counts["resumed"] == 1, (router.counts, again.error, len(again.tokens))
    assert again.comparable == alone.comparable
    assert all(isinstance(event, TokenEvent) for event in again.events[-3:-1])


def lost_after(tokens: int, router, workers: dict[str, RealWorker], asked: Generation) -> Whole:
    """Ask, and kill the worker that answers once its client has `tokens` tokens; steps wait for that."""
    lost = threading.Event()

    def hold(engine: Engine) -> None:
        run, steps = engine.runner.run, count()

        def held(step) -> torch.Tensor:
            if next(steps) > tokens:
                assert lost.wait(60)
            return run(step)

        engine.runner.run = held

    for worker in workers.values():
        hold(worker.engine)
    received = ask(router, asked)
    received.wait_for(tokens)
    (name,) = (link.name for link in router.links.values() if link.open)
    kill(router, name, workers[name])
    lost.set()
    return received.wait()


def test_composed_answer_continues_after_a_lost_worker(model) -> None:
    composed = generation("drawn", segments=(Span(10, 80), Span(80, 140)), fidelity=Fidelity.FAST)
    with cluster(model, a="one", b="one") as (router, workers):
        alone = ask(router, composed).wait()
        again = lost_after(20, router, workers, composed)
    assert again.comparable == alone.comparable
    assert alone.finished.account.composed_tokens


def test_next_turn_is_routed_to_its_prefix(model) -> None:
    """Six sessions of three turns: each stays where it began, and as much is cached there as was predicted."""
    with cluster(model, a="one", b="one", c="one") as (router, workers):
        for worker in workers.values():  # equally fast, whatever else the machine does
            worker.engine.backlog = lambda: Backlog(0, 0, 0, PrefillSpeed(0.0, 0.001), 1.0)
        sessions = [words(130 + 20 * i, "session", i) for i in range(6)]
        for turn in range(3):
            for session in sessions:
                received = ask(router, generation("greedy", session, 8)).wait()
                assert (received.finished.account.cached_tokens > 0) == (turn > 0)
                session += received.tokens + words(15, "turn", turn, len(session))
            for worker in workers.values():
                worker.engine.drain(60)
            settle(router)
        assert router.counts["cached_as_predicted"] == 18, router.counts
        assert all(worker.engine.scheduler.cache.stats().resumes for worker in workers.values())


def test_predictions_hold_for_the_moment_at_which_a_request_comes(model) -> None:
    """A prefix that is computed while a request waits is counted apart; a scored prompt reuses nothing."""
    with cluster(model, a="one") as (router, _):
        prompt = words(400, "shared")
        first, second = (ask(router, generation("greedy", prompt, 4)) for _ in range(2))
        first.wait(), second.wait()
        assert second.finished.account.cached_tokens > 0, "it did not wait for the first one"
        settle(router)
        scored = ask(router, generation("prompt scores", prompt, 4)).wait()
        assert scored.finished.account.resumed_at == 0
        ask(router, generation("greedy", prompt, 4)).wait()
        counts = {name: router.counts[name] for name in ("cached_as_predicted", "gained_waiting", "lost_waiting")}
        assert counts == {"cached_as_predicted": 4, "gained_waiting": 1, "lost_waiting": 0}


def test_lost_events_make_no_wrong_prediction_after_a_resync(model, monkeypatch) -> None:
    """Half of all live messages are lost, and little memory is there, so that much is evicted."""
    draw, receive, lost = random.Random(1), Follower._receive, []

    def losing(follower: Follower) -> None:
        if draw.random() < 0.5:
            lost.append(follower._live.recv_multipart())
        else:
            receive(follower)

    monkeypatch.setattr(publisher, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(Follower, "_receive", losing)
    with cluster(model, 30, a="one", b="one", c="one") as (router, workers):
        followers = {name: router.links[name].follower for name in workers}

        def is_synced(name: str) -> bool:
            picture, stream = followers[name].picture, workers[name].publishing._publisher._stream
            return picture.is_whole and picture.next == stream.next

        for _ in range(24):
            answer = ask(router, generation("greedy", words(260, "lost", draw.randrange(10)), 8)).wait()
            assert answer.error is None
            for name, worker in workers.items():
                worker.engine.drain(60)
                until(lambda name=name: is_synced(name))
        assert router.counts["cached_as_predicted"] == 24, router.counts
        stats = [worker.engine.scheduler.cache.stats() for worker in workers.values()]
        assert sum(one.evicted_checkpoints for one in stats) > 3
        assert sum(one.resumes for one in stats) > 3
        assert sum(one.replays + one.snapshots for one in followers.values()) > 10 < len(lost)


def settle(router) -> None:
    """Wait until the router's pictures are those of the caches now: an event of each has come after the last step."""
    followers = [link.follower for link in router.links.values()]
    heard = [follower.picture.next for follower in followers]
    until(lambda: all(one.picture.next > n for one, n in zip(followers, heard, strict=True)))


def test_answer_continues_only_under_its_fingerprint(model) -> None:
    with cluster(model, a="one", b="another") as (router, workers):
        router.assigning.patience = 0.5
        received = lost_after(5, router, workers, generation("greedy"))
    assert "no worker with the same fingerprint" in str(received.error)


@pytest.mark.parametrize("kind", ["drawn", pytest.param("greedy", marks=pytest.mark.full)])
def test_an_answer_after_a_pull_has_the_same_bits(model, kind: str) -> None:
    prompt = words(700, "pulled")
    with cluster(model, a="one", b="one", c="another") as (router, workers):
        router.assigning.selection.choice = RoundRobin()
        answers = []
        for worker in workers.values():
            worker.engine.scheduler.tiers.prefill_seconds = lambda tokens: 1.0 * tokens  # reading always wins
        for _ in workers:
            answers.append(ask(router, generation(kind, prompt)).wait())
            for worker in workers.values():
                worker.engine.drain(60)
            settle(router)
        assert router.counts["pulled"] == router.counts["told_of_peers"] == 1, router.counts
        assert router.counts["cached_as_predicted"] == 3, router.counts
        until(lambda: router.stats().loaded_tokens == 700)
        (pulls,) = router.stats().tiers
        assert (pulls.kind, pulls.read, pulls.sent, pulls.corrupt) == ("peer", 3, 3, 0)
    first, pulled, other = answers
    assert pulled.comparable == first.comparable
    account = pulled.finished.account
    assert (account.loaded_from, account.loaded_tokens) == ("peer", 700)
    assert other.finished.account.loaded_from is None
    assert other.finished.account.tier_outcome is None


def test_a_pulled_answer_whose_worker_is_lost_has_the_same_bits(model) -> None:
    asked = generation("drawn", words(700, "pulled"))
    with cluster(model, a="one", b="one") as (router, workers):
        router.assigning.selection.choice = RoundRobin()
        alone = ask(router, asked).wait()
        for worker in workers.values():
            worker.engine.drain(60)
        settle(router)
        again = lost_after(20, router, workers, asked)
        assert router.counts["resumed"] == router.counts["told_of_peers"] == 1, router.counts
    assert again.comparable == alone.comparable


def test_a_hot_prefix_spreads_when_its_holder_is_busy(model) -> None:
    prompt, goes_on = words(700, "hot"), threading.Event()
    with cluster(model, a="one", b="one") as (router, workers):
        first = ask(router, generation("greedy", prompt)).wait()
        for worker in workers.values():
            worker.engine.drain(60)
        settle(router)
        same = ask(router, generation("greedy", prompt)).wait()
        (holder,) = (one for one in workers.values() if one.engine.scheduler.cache.stats().checkpoints)
        run = holder.engine.runner.run
        holder.engine.runner.run = lambda step: (goes_on.wait(60), run(step))[1]
        holder.engine.submit(generation("greedy", words(5000, "busy")), lambda event: None)
        until(lambda: max(link.backlog.queued_tokens for link in router.links.values()) > 4000)
        spread = ask(router, generation("greedy", prompt)).wait()
        goes_on.set()
        assert router.counts["told_of_peers"] == router.counts["pulled"] == 1, router.counts
    assert same.comparable == spread.comparable == first.comparable
    assert spread.finished.account.loaded_from == "peer"
    assert same.finished.account.loaded_from is None
