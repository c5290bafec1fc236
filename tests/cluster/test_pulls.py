"""Pulls between real engines: a prefix from another worker's memory changes no bit, and nothing else comes in."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import pytest
import zmq

from headwater.account import TierOutcome
from headwater.cluster import peer_channel, peer_memory
from headwater.cluster.encryption import CurveClient, KeyPair
from headwater.cluster.peer_channel import FAILED, Channel, Find, Get, answer, encode
from headwater.cluster.peer_memory import KnownParts, Offered, PeerMemory
from headwater.cluster.pulling import Pulling, own_security
from headwater.cluster.sockets import PLAIN, Contact, opened
from headwater.cluster.wire import Peer
from headwater.config import ServeConfig
from headwater.engine.tiers.segments import MAX_EXPECTED_SEGMENTS
from headwater.schedule.handover import Handover
from headwater.schedule.sequence import key_of
from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.memory import MemoryStore
from headwater.tiers.names import Names
from headwater.tiers.part import Part, Sealer
from headwater.tiers.store import Store
from tests.cluster.fake import until
from tests.exactness.rig import Answer, Make, words
from tests.exactness.test_matrix import FAMILIES
from tests.exactness.test_tiers import server

ANYWHERE = "tcp://127.0.0.1:*"
KEY = bytes(range(32))
OWN = Fingerprint.of({"probe": "one"})
AMPLE = 400  # pages in addition to states
PROMPT = 340  # tokens: one whole run of KV, and a ragged one
END = (PROMPT - 1) // 64 * 64
pytestmark = pytest.mark.usefixtures("short_runs")


class Worker:
    """An engine, and both ends of its pulls; a load always beats computing."""

    def __init__(
        self,
        make: Make,
        key: bytes = KEY,
        fingerprint: Fingerprint = OWN,
        security=(PLAIN, PLAIN),
        pages: int = AMPLE,
        stores: Sequence[Store] = (),
        **settings,
    ) -> None:
        self.incarnation = uuid.uuid4().bytes
        self.rig = make(pages + 12 * make.checkpoint_pages, **settings)
        config = ServeConfig(tier_timeout=60.0)
        self.rig.engine.use_tiers(list(stores), key, fingerprint, config)
        self.pulling = Pulling(self.rig.engine, key, fingerprint, config, self.incarnation, ANYWHERE, security)
        self.tiers = self.rig.engine.scheduler.tiers
        self.tiers.prefill_seconds = lambda tokens: 1.0 * tokens
        self.pulling.start()

    @property
    def peer(self) -> Peer:
        return Peer(self.incarnation, self.pulling.contact)

    @property
    def cache(self):
        return self.rig.engine.scheduler.cache

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.tiers.peers.tier.counts)

    def ask(self, prompt: Sequence[int], *peers: Worker, follows: int | None = None, **more) -> Answer:
        """Ask, with the word that these workers have more of the prompt, and the number of its prefill elsewhere."""
        handover = Handover((), tuple(peer.incarnation for peer in peers), follows)
        submit = self.rig.engine.submit
        self.rig.engine.submit = lambda *given: submit(*given, handover)
        try:
            return self.rig.ask(list(prompt), **more)
        finally:
            self.rig.engine.submit = submit


@contextmanager
def pool(*workers: Worker) -> Iterator[None]:
    """Start workers that know each other."""
    with ExitStack() as stack:
        for worker in workers:
            worker.pulling.know({one.peer for one in workers})
            stack.enter_context(worker.rig)
            stack.callback(worker.pulling.close)
        yield


@pytest.mark.parametrize("way", ["shared memory", "network"])
def test_a_pulled_prefix_changes_no_bit(make, monkeypatch, same_bits_as_without_a_cache, way) -> None:
    if way == "network":
        monkeypatch.setattr(peer_channel, "this_host", lambda: "")
    a, b = Worker(make, security=own_security()), Worker(make, security=own_security())
    with pool(a, b):
        first = a.ask(words(PROMPT, "pull"))
        again = b.ask(first.prompt, a)
        turn = b.ask([*first.prompt, *words(40, "turn")])
        assert a.pulling.sending.parts.sent == 4
        stats = b.tiers.figures().tiers[0]
    assert stats.pulled_by_way() == {"shared memory": 0, "network": 0} | {way: stats.bytes_read}
    assert again.account.tier_outcome == TierOutcome.LOADED
    assert again.account.loaded_from == "peer"
    assert again.account.loaded_tokens == again.account.cached_tokens == PROMPT
    assert turn.account.cached_tokens == PROMPT
    assert turn.account.loaded_tokens == 0
    assert all(same_bits_as_without_a_cache(make, [first, again, turn]))


@contextmanager
def holder_and_other(make, **of_other) -> Iterator[tuple[Worker, Worker, Answer]]:
    """Yield a worker that has a prompt cached, another one that knows it, and the answer to the prompt."""
    a, b = Worker(make), Worker(make, **of_other)
    with pool(a, b):
        yield a, b, a.ask(words(PROMPT, "pull"))


def changing(worker: Worker, change: Callable[[list[bytes]], list[bytes] | None], of: str = "sealed") -> None:
    """Let `change` have each part's pieces before they are sent. of: the method that seals these parts."""
    parts = worker.pulling.sending.parts
    sealed = getattr(parts, of)

    @contextmanager
    def changed(*asked):
        with sealed(*asked) as pieces:
            yield change([bytes(piece) for piece in pieces])

    setattr(parts, of, changed)


def test_a_part_of_other_tokens_is_computed(make, monkeypatch) -> None:
    """Keys do not travel with parts: the digest tells whether the holder's is the reader's."""
    seal = Sealer.seal

    def of_others(self, name: str, part: Part) -> list:
        return seal(self, name, replace(part, key=bytes(len(part.key))))

    with holder_and_other(make) as (a, b, first):
        monkeypatch.setattr(Sealer, "seal", of_others)
        again = b.ask(first.prompt, a)
    assert (again.account.cached_tokens, again.account.tier_outcome) == (0, TierOutcome.CORRUPT)


@pytest.mark.parametrize("piece", [0, 2, -1], ids=["header", "content", "digest"])
def test_a_part_changed_on_the_way_is_computed(make, caplog, same_bits_as_without_a_cache, piece) -> None:
    def flipped(pieces: list[bytes]) -> list[bytes]:
        content = bytearray(pieces[piece])
        content[len(content) // 2] ^= 1
        pieces[piece] = bytes(content)
        return pieces

    with holder_and_other(make) as (a, b, first):
        changing(a, flipped)
        again = b.ask(first.prompt, a)
        assert b.counts["corrupt"] >= 1
        assert not b.pulling.memory.channels[a.incarnation].usable
    assert (again.account.cached_tokens, again.account.tier_outcome) == (0, TierOutcome.CORRUPT)
    assert all(same_bits_as_without_a_cache(make, [first, again]))
    assert "sent a damaged part" in caplog.text


@pytest.mark.parametrize("is_known", [True, False], ids=["the router says so", "it is silent"])
def test_a_peer_that_ends_in_mid_pull_is_left(make, monkeypatch, same_bits_as_without_a_cache, is_known) -> None:
    monkeypatch.setattr(peer_memory, "PART_SECONDS", 60.0 if is_known else 0.2)
    asked, ends = threading.Event(), threading.Event()

    def hang(pieces: list[bytes]) -> list[bytes]:
        asked.set()
        ends.wait(60)
        return pieces

    with holder_and_other(make) as (a, b, first):
        changing(a, hang)
        answer = threading.Thread(target=lambda: results.append(b.ask(first.prompt, a)))
        results: list[Answer] = []
        answer.start()
        assert asked.wait(60)
        if is_known:
            b.pulling.know({b.peer})
        answer.join(60)
        ends.set()
        free = b.rig.engine.scheduler.tiers
        until(lambda: not free.busy)
    assert (results[0].account.cached_tokens, results[0].account.tier_outcome) == (0, TierOutcome.FAILED)
    assert all(same_bits_as_without_a_cache(make, [first, *results]))


def test_a_silent_peer_delays_no_lookup_in_stores(make, monkeypatch) -> None:
    """A request that names no peer is looked up in the store while another one's peer does not answer."""
    monkeypatch.setattr(peer_memory, "FIND_SECONDS", 30.0)
    a, store, prompt = Worker(make), MemoryStore(None), words(PROMPT, "stored")
    with server(make, [store], fingerprint=OWN) as rig:
        rig.ask(prompt)
    b = Worker(make, stores=[store])
    with pool(b):
        b.pulling.know({a.peer})
        a.pulling.sending.close()  # it is silent
        submit = b.rig.engine.submit
        b.rig.engine.submit = partial(submit, handover=Handover(peers=(a.incarnation,)))
        waiting = b.rig.submit(words(PROMPT, "pull"), 4)
        b.rig.engine.submit = submit
        assert b.rig.ask(prompt).account.tier_outcome == TierOutcome.LOADED
        assert not waiting.done.is_set()
        b.pulling.know(set())
        b.rig.wait(waiting)


def test_a_sender_that_fails_at_one_part_answers_others(
    make, monkeypatch, caplog, same_bits_as_without_a_cache
) -> None:
    monkeypatch.setattr(peer_memory, "PART_SECONDS", 60.0)

    def fail(pieces: list[bytes]) -> list[bytes]:
        raise ValueError("of the test")

    with holder_and_other(make) as (a, b, first):
        parts, sealed = a.pulling.sending.parts, a.pulling.sending.parts.sealed
        changing(a, fail)
        begun = time.monotonic()
        again = b.ask(first.prompt, a)
        assert time.monotonic() - begun < 30, "it is told so"
        parts.sealed = sealed
        b.pulling.memory.channels[a.incarnation].failed_until = 0.0
        later = b.ask(a.ask(words(PROMPT, "later")).prompt, a)
    assert again.account.tier_outcome == TierOutcome.FAILED
    assert later.account.loaded_tokens == PROMPT
    assert "is not answered: ValueError at" in caplog.text
    assert not any(record.exc_info for record in caplog.records)
    assert all(same_bits_as_without_a_cache(make, [first, again, later]))


@pytest.mark.parametrize(
    "other", [{"fingerprint": Fingerprint.of({"probe": "another"})}, {"key": bytes(32)}], ids=["fingerprint", "key"]
)
def test_workers_of_another_fingerprint_or_key_are_never_mixed(make, other) -> None:
    with holder_and_other(make, **other) as (a, b, first):
        again = b.ask(first.prompt, a)
        assert a.pulling.sending.parts.sent == 0
    assert (again.account.cached_tokens, again.account.tier_outcome) == (0, TierOutcome.MISS)


@pytest.mark.parametrize("namespace", ["tenant", "another", ""])
def test_tenants_prefix_is_pulled_only_for_that_tenant(make, namespace) -> None:
    a, b = Worker(make), Worker(make)
    with pool(a, b):
        first = a.ask(words(PROMPT, "pull"), namespace="tenant")
        again = b.ask(first.prompt, a, namespace=namespace)
    assert again.account.loaded_tokens == (PROMPT if namespace == "tenant" else 0)


@pytest.mark.parametrize("asked", ["a question", "no question"])
def test_every_question_is_answered(make, monkeypatch, asked) -> None:
    a = Worker(make)

    def fail(*given) -> None:
        raise ValueError("of the test")

    monkeypatch.setattr(a.pulling.sending.parts, "find", fail)
    with pool(a), opened(zmq.DEALER) as socket:
        socket.connect(a.pulling.contact.address)
        for _ in range(2):
            socket.send(encode(Find(a.incarnation, "", b"key", 1)) if asked == "a question" else b"none")
            assert socket.poll(20_000)
            assert socket.recv_multipart() == [FAILED]


def test_a_holder_computes_the_names_of_a_pulled_prefix_once(make, monkeypatch) -> None:
    digests, by_thread = Names.digests, Counter[str]()

    def counted(*given):
        by_thread[threading.current_thread().name] += 1
        return digests(*given)

    monkeypatch.setattr(Names, "digests", counted)
    with holder_and_other(make) as (a, b, first):
        assert b.ask(first.prompt, a).account.loaded_tokens == PROMPT
        assert a.pulling.sending.parts.sent == 4
        assert by_thread["headwater-parts"] == 1
        b.ask(a.ask(words(PROMPT, "later")).prompt, a)
        assert by_thread["headwater-parts"] == 2


def test_a_prompt_is_sent_once_for_all_of_its_parts(make, monkeypatch) -> None:
    ask, asked = Channel.ask, []

    def noted(self, message, seconds):
        asked.append(message)
        return ask(self, message, seconds)

    monkeypatch.setattr(Channel, "ask", noted)
    with holder_and_other(make) as (a, b, first):
        assert b.ask(first.prompt, a).account.loaded_tokens == PROMPT
    assert [type(one) for one in asked] == [Find, Get, Get, Get, Get]
    assert all(len(encode(one)) < 250 for one in asked[1:])


def test_prompt_is_sent_again_to_a_holder_that_forgot_it(make, same_bits_as_without_a_cache) -> None:
    with holder_and_other(make) as (a, b, first):

        def forgetting(pieces: list[bytes]) -> list[bytes]:
            a.pulling.sending._prefixes.clear()
            return pieces

        changing(a, forgetting)
        again = b.ask(first.prompt, a)
        assert again.account.loaded_tokens == PROMPT
        assert b.counts["read"] == a.pulling.sending.parts.sent == 4
    assert all(same_bits_as_without_a_cache(make, [first, again]))


def test_pull_does_not_count_as_use_of_the_holders_copy(make) -> None:
    """The pulling worker has its own copy, and its request counts there."""

    def times(worker: Worker) -> list[tuple[int, int]]:
        return [(node.kv_time, node.checkpoint_time) for node in worker.cache.index]

    with holder_and_other(make) as (a, b, first):
        a.rig.settle()  # its answer's prefill uses the prompt, too
        before = times(a)
        assert b.ask(first.prompt, a).account.loaded_tokens == PROMPT
        assert times(a) == before
        used = times(b)
        b.ask(first.prompt)
        assert times(b) != used


def test_only_named_peers_are_asked_and_only_one_incarnation_answers(make) -> None:
    with holder_and_other(make) as (a, b, first):
        assert b.ask(first.prompt).account.tier_outcome is None
        memory = b.pulling.memory
        memory.know({Peer(b"another", a.peer.contact)})
        memory.ask([b"another", b"unknown"], "", key_of(first.prompt), PROMPT)
        assert not len(memory._found)
        memory.know({a.peer})
        memory.ask([a.incarnation], "", key_of(first.prompt), PROMPT)
        assert len(memory._found) == 4


def test_pages_are_not_evicted_while_they_are_sent(make) -> None:
    a, prompt = Worker(make, pages=24), words(300, "pull")
    with pool(a):
        a.ask(prompt, max_tokens=1)
        parts, key = a.pulling.sending.parts, key_of(prompt)
        prefix = parts.find("", key, len(prompt))
        assert prefix.at == 256
        with parts.sealed(prefix, 0) as pieces:
            before = [bytes(piece) for piece in pieces]
            for n in range(8):
                a.ask(words(700, "other", n), max_tokens=1)
            assert [bytes(piece) for piece in pieces] == before
            assert parts.find("", key, len(prompt)).at == 256
        for n in range(8):
            a.ask(words(700, "more", n), max_tokens=1)
        assert parts.find("", key, len(prompt)) is None
        with parts.sealed(prefix, 0) as pieces:
            assert pieces is None


def test_strangers_get_no_prefix(make, caplog) -> None:
    """A key that no router named is refused; the control is a worker's."""
    server, client = own_security()
    a, own = Worker(make, security=(server, client)), KeyPair.new()
    with pool(a):
        first = a.ask(words(PROMPT, "pull"))
        asked = encode(Find(a.incarnation, "", key_of(first.prompt), PROMPT))
        for security in (CurveClient(own), PLAIN):
            with opened(zmq.DEALER) as socket:
                security.to(a.pulling.contact.key)(socket, a.pulling.contact.address)
                socket.send(asked)
                assert not socket.poll(300)
        assert "was refused" in caplog.text
        a.pulling.know({a.peer, Peer(b"b", Contact("", own.public))})
        with opened(zmq.DEALER) as socket:
            CurveClient(own).to(a.pulling.contact.key)(socket, a.pulling.contact.address)
            socket.send(asked)
            assert socket.poll(20_000)
            assert answer(socket.recv()).at == END


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pulled_prefixes_of_every_family(load, same_bits_as_without_a_cache, family, dtype) -> None:
    make = Make(*load(family, dtype, 2))
    with holder_and_other(make) as (a, b, first):
        again = b.ask(first.prompt, a)
        turn = b.ask([*first.everything, *words(40, "turn")])
    assert again.account.loaded_tokens == again.account.cached_tokens == PROMPT
    assert turn.account.cached_tokens >= PROMPT
    assert all(same_bits_as_without_a_cache(make, [first, again, turn]))


def test_answer_replaces_an_earlier_one_to_the_same_prompt() -> None:
    channel, known = Channel(Peer(b"other", Contact("tcp://other", b"")), PLAIN), KnownParts(256)
    for names in (["state at 2", "run"], ["state at 1", "run"]):
        known.note(Offered(channel, Find(b"other", "", b"prompt", 2), b"", dict.fromkeys(names, 0)))
    known.note(Offered(channel, Find(b"other", "", b"prompt, longer", 2), b"", {"run": 0}))
    assert [known.find(name) is not None for name in ("state at 2", "state at 1", "run")] == [False, True, True]
    assert len(known) == 2


def test_known_segments_displace_no_prefix_and_cover_the_engines_limit() -> None:
    memory = PeerMemory(b"own", PLAIN)
    memory.know([Peer(b"other", Contact("tcp://other", b""))])
    memory._found.note(Offered(memory.channels[b"other"], Find(b"other", "", b"prompt", 2), b"", {"run": 0}))
    names = [f"segment {number}" for number in range(MAX_EXPECTED_SEGMENTS + 1)]
    for name in names:
        memory.expect([b"other"], name.encode(), name)
    assert memory.has(["run", *names]) == [True, False, *[True] * MAX_EXPECTED_SEGMENTS]


def test_a_pull_speed_is_reported_while_some_peer_can_be_asked(make) -> None:
    with holder_and_other(make) as (a, b, first):
        memory = b.pulling.memory
        assert b.tiers.figures().pull is not None
        memory.know({b.peer})
        assert b.tiers.figures().pull is None, "it knows no other"
        memory.know({a.peer, Peer(b"silent", a.peer.contact)})
        channel, silent = memory.channels[a.incarnation], memory.channels[b"silent"]
        channel.fail("of the test")
        assert b.tiers.figures().pull is not None
        silent.fail("of the test")
        assert b.tiers.figures().pull is None
        channel.failed_until = 0.0  # the time is over
        assert b.tiers.figures().pull is not None
        assert b.ask(first.prompt, a).account.loaded_tokens == PROMPT


def test_a_closed_memory_takes_no_worker_any_more() -> None:
    memory = PeerMemory(b"own", PLAIN)
    memory.know([Peer(b"other", Contact("tcp://other", b""))])
    memory.close()
    memory.know([Peer(b"late", Contact("tcp://late", b""))])
    assert not memory.channels
