"""Tiers under faults and choices: no request is lost, and none waits for a store that does not answer."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from headwater.account import TierOutcome
from headwater.config import ServeConfig
from headwater.engine.tiers.io import TierIO
from headwater.engine.tiers.tier import Workers
from headwater.schedule.sequence import key_of
from headwater.tiers.disk import DiskStore
from headwater.tiers.memory import MemoryStore
from headwater.tiers.names import RUN, Names, run_name, runs_of, state_name
from headwater.tiers.part import Sealer
from headwater.tiers.store import StoreError
from tests.exactness.rig import Make, Rig, words
from tests.exactness.test_tiers import AMPLE, KEY, OWN, PROMPT, copied, disk, server

ROOT = Path(__file__).parents[3]


def alike(make: Make, prompts: Sequence[list[int]], answers) -> bool:
    """Return whether answers are those of a server without tiers."""
    with make(600 + make.checkpoint_pages) as rig:
        return all(rig.ask(prompt).tokens == answer.tokens for prompt, answer in zip(prompts, answers, strict=True))


def outcomes(rig: Rig) -> dict[str, int]:
    return dict(rig.engine.scheduler.tiers.tiers[0].counts)


def mended(rig: Rig) -> None:
    """Let the first tier be used again at once."""
    tier = rig.engine.scheduler.tiers.tiers[0]
    tier.unreadable_until = tier.unwritable_until = 0.0


class Broken(MemoryStore):
    """A store whose calls fail, or wait, as told."""

    def __init__(self) -> None:
        super().__init__(None)
        self.fails: set[str] = set()
        self.waits: dict[str, threading.Event] = {}

    def _may(self, call: str) -> None:
        if call in self.waits:
            self.waits[call].wait(30)
        if call in self.fails:
            raise StoreError(f"{call} fails")

    def has(self, names):
        self._may("has")
        return super().has(names)

    def read_into(self, name, pieces):
        self._may("get")
        return super().read_into(name, pieces)

    def put(self, name, pieces, keep=frozenset()):
        self._may("put")
        super().put(name, pieces, keep)

    def delete(self, names):
        self._may("delete")
        super().delete(names)

    def close(self):
        self._may("close")


def holding(make: Make, prompt: list[int]) -> tuple[Broken, list[int]]:
    """Return a store with the parts of a prompt, and the prompt."""
    store = Broken()
    with server(make, [store]) as rig:
        rig.ask(prompt)
    return store, prompt


@pytest.mark.parametrize("call", ["has", "get", "put"])
def test_a_store_that_fails_costs_no_request(make, call) -> None:
    store, prompt = Broken(), words(PROMPT, "broken")
    with server(make, [store]) as rig:
        first = rig.ask(prompt)
    store.fails.add(call)
    with server(make, [store]) as rig:
        again, other = rig.ask(prompt), rig.ask(words(PROMPT, "other"))
        copied(rig)
        assert outcomes(rig)["errors"] >= 1
        tier = rig.engine.scheduler.tiers.tiers[0]
        assert (tier.usable, tier.writable) == {"has": (False, False), "get": (False, True), "put": (True, False)}[call]
    assert alike(make, [prompt, prompt, words(PROMPT, "other")], [first, again, other])
    assert bool(again.account.loaded_tokens) == (call == "put")


@pytest.mark.parametrize("call", ["has", "get"])
def test_a_store_that_does_not_answer_is_not_waited_for(make, call) -> None:
    store, prompt = Broken(), words(PROMPT, "slow")
    with server(make, [store]) as rig:
        first = rig.ask(prompt)
    store.waits[call] = threading.Event()
    with server(make, [store]) as rig:
        tiers = rig.engine.scheduler.tiers
        tiers.timeout = 0.1
        tiers.load_seconds = lambda tier, state, tokens: 1e-3
        tiers.prefill_seconds = lambda tokens: 1e-4 * tokens
        begun = time.monotonic()
        again = rig.ask(prompt)
        assert time.monotonic() - begun < 20
        assert again.account.tier_outcome == TierOutcome.SLOW
        store.waits[call].set()
        copied(rig)
        third = rig.ask(prompt)  # the part that was read too late for the request is in memory
    assert alike(make, [prompt] * 3, [first, again, third])
    assert third.account.cached_tokens == PROMPT, "the second one kept its tail"


def test_a_store_that_does_not_answer_delays_no_other(make) -> None:
    """A request that only the other store is relevant to waits for `--tier-timeout`, and is loaded from it."""
    slow, (store, prompt) = Broken(), holding(make, words(PROMPT, "other store"))
    slow.waits["has"] = threading.Event()
    with server(make, [slow, store]) as rig:
        rig.engine.scheduler.tiers.timeout = 0.2
        again = rig.ask(prompt)
        assert not slow.waits["has"].is_set()
        slow.waits["has"].set()
    assert again.account.tier_outcome == TierOutcome.LOADED
    assert alike(make, [prompt], [again])


def test_a_store_that_does_not_give_parts_delays_no_other(make) -> None:
    (slow, late), (store, prompt) = (holding(make, words(PROMPT, text)) for text in ("late", "soon"))
    slow.waits["get"] = threading.Event()
    with server(make, [slow, store]) as rig:
        waiting = rig.submit(late, 4)
        while not rig.engine.scheduler.tiers.loads.open:
            time.sleep(0.005)
        begun = time.monotonic()
        again = rig.ask(prompt)
        assert time.monotonic() - begun < 20, "the slow one takes 30 s"
        slow.waits["get"].set()
        rig.wait(waiting)
    assert (again.account.tier_outcome, waiting.account.tier_outcome) == (TierOutcome.LOADED, TierOutcome.LOADED)


@pytest.mark.parametrize(("seconds", "outcome"), [(1e-3, TierOutcome.SLOW), (1.0, TierOutcome.LOADED)])
def test_late_load_is_awaited_while_computing_takes_four_times_as_long(make, seconds, outcome) -> None:
    store, prompt = holding(make, words(PROMPT, "late"))
    store.waits["get"] = threading.Event()
    with server(make, [store]) as rig:
        tiers = rig.engine.scheduler.tiers
        tiers.timeout = 0.1
        tiers.load_seconds = lambda tier, state, tokens: 1e-3
        tiers.prefill_seconds = lambda tokens: seconds * tokens
        asked = rig.submit(prompt, 4)
        time.sleep(1.5)  # a quarter of 1,280 tokens' 1.28 seconds has gone by; of 1,280 seconds, it has not
        store.waits["get"].set()
        assert rig.wait(asked).account.tier_outcome == outcome


@pytest.mark.parametrize("call", ["has", "get", "put", "close"])
def test_a_store_that_never_answers_does_not_keep_the_end_waiting(make, monkeypatch, caplog, call) -> None:
    monkeypatch.setattr("headwater.engine.tiers.io.CLOSE_SECONDS", 0.5)
    store, prompt = holding(make, words(PROMPT, "hung"))
    store.waits[call] = threading.Event()
    rig = make(AMPLE + 12 * make.checkpoint_pages)
    config = ServeConfig(tier=("disk:unused",), tier_store="through", tier_timeout=0.1)
    rig.engine.use_tiers([store], KEY, OWN, config)
    rig.engine.scheduler.tiers.prefill_seconds = lambda tokens: 1e-4 * tokens
    rig.engine.scheduler.tiers.load_seconds = lambda tier, state, tokens: 1e-5
    rig.engine.start()
    answers = [rig.ask(prompt), rig.ask(words(PROMPT, "other"))]
    begun = time.monotonic()
    rig.engine.stop(lambda: begun + 0.5 - time.monotonic())
    assert time.monotonic() - begun < 5
    assert "has not answered for 0.5 s" in caplog.text
    store.waits[call].set()
    assert alike(make, [prompt, words(PROMPT, "other")], answers)


def test_a_call_that_never_returns_keeps_no_process_from_ending() -> None:
    script = """
import threading
from headwater.engine.tiers.tier import Workers
workers = Workers(1, "hung")
hung, never_begun = workers.submit(threading.Event().wait), workers.submit(print, "begun")
while not hung.running():
    pass
assert not workers.end(0.1)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_call_that_is_given_after_the_end_is_cancelled() -> None:
    workers = Workers(1, "ended")
    assert workers.end(10)
    assert workers.submit(print, "never").cancelled()


def test_requests_that_wait_for_a_free_load_are_not_held_for_ever(make) -> None:
    """All readers hang: more requests than there are loads at once compute after their time."""
    prompts, store = [words(300 + i, "held", i) for i in range(7)], Broken()
    with server(make, [store]) as rig:
        firsts = [rig.ask(prompt) for prompt in prompts]
    store.waits["get"] = threading.Event()
    with server(make, [store]) as rig:
        rig.engine.scheduler.tiers.timeout = 0.1
        rig.engine.scheduler.tiers.load_seconds = lambda tier, state, tokens: 1e-3
        rig.engine.scheduler.tiers.prefill_seconds = lambda tokens: 1e-4 * tokens
        begun = time.monotonic()
        answers = [rig.wait(answer) for answer in [rig.submit(prompt, 8) for prompt in prompts]]
        assert time.monotonic() - begun < 20
        store.waits["get"].set()
        copied(rig)
    assert {answer.account.tier_outcome for answer in answers} == {TierOutcome.SLOW}
    assert [answer.tokens for answer in answers] == [first.tokens for first in firsts]


def test_prefix_evicted_while_a_request_waits_is_looked_up(make) -> None:
    store, prompt = holding(make, words(PROMPT, "lost"))
    with server(make, [store], max_running=1) as rig:
        rig.ask(prompt)
        long = rig.submit(words(100, "long"), 60)
        while not long.tokens:
            time.sleep(0.01)
        queued = rig.submit(prompt, 4)
        cache = rig.engine.scheduler.cache
        with rig.engine.changed:
            for node in list(cache.index):
                if node.checkpoint is not None and not node.holds:
                    cache.tails.drop(node)
                    cache.pool.states.give(cache.index.drop(node))
        rig.wait(queued)
    assert queued.account.tier_outcome == TierOutcome.LOADED


def test_scratch_memory_of_a_load_is_provided_while_it_is_read(make, monkeypatch) -> None:
    store, prompt = holding(make, words(PROMPT, "expected"))
    expected: list[int] = []
    monkeypatch.setattr("headwater.memory.arena.Arena.expect", lambda arena, tokens: expected.append(tokens))
    with server(make, [store]) as rig:
        assert rig.ask(prompt).account.loaded_tokens == PROMPT
    assert expected == [PROMPT]


@pytest.mark.parametrize(("error", "outcome"), [(OSError(errno.ENOMEM, "none"), "loaded"), (RuntimeError(), "failed")])
def test_pages_are_not_given_back_while_parts_are_read(make, monkeypatch, error: Exception, outcome: str) -> None:
    """Without scratch memory a load continues; after another error it waits for its readers."""
    store, prompt = holding(make, words(PROMPT, "no scratch"))
    events: list[str] = []
    read, finish = TierIO._read, TierIO._finish

    def fail(arena: object, tokens: int) -> None:
        raise error

    def slow(self: TierIO, *given) -> TierOutcome | None:
        time.sleep(0.1)
        failed = read(self, *given)
        events.append("read")
        return failed

    def finished(self: TierIO, one) -> None:
        events.append("finished")
        finish(self, one)

    monkeypatch.setattr("headwater.memory.arena.Arena.expect", fail)
    monkeypatch.setattr(TierIO, "_read", slow)
    monkeypatch.setattr(TierIO, "_finish", finished)
    with server(make, [store]) as rig:
        account = rig.ask(prompt).account
    assert account.tier_outcome == getattr(TierOutcome, outcome.upper())
    assert events == ["read"] * (len(events) - 1) + ["finished"]
    assert len(events) > 2


@pytest.mark.parametrize(("seconds", "outcome"), [(1e-9, "computing_is_faster"), (1.0, "loaded")])
def test_a_state_is_loaded_only_if_that_beats_computing(make, seconds, outcome) -> None:
    store, prompt = holding(make, words(PROMPT, "choice"))
    with server(make, [store]) as rig:
        rig.engine.scheduler.tiers.prefill_seconds = lambda tokens: seconds * tokens
        assert rig.ask(prompt).account.tier_outcome == outcome


def test_load_in_progress_is_awaited_and_not_repeated(make) -> None:
    store, prompt = holding(make, words(PROMPT, "followed"))
    store.waits["get"] = threading.Event()
    with server(make, [store]) as rig:
        answers = [rig.submit([*prompt, *words(20, i)], 4) for i in range(4)]
        deadline = time.monotonic() + 30
        while not rig.engine.scheduler.tiers.loads.open and time.monotonic() < deadline:
            time.sleep(0.01)
        beside = rig.ask(words(200, "beside"))  # others continue
        store.waits["get"].set()
        answers = [rig.wait(answer) for answer in answers]
        assert outcomes(rig)["read"] == 4, "a state, two runs and a tail"
    assert beside.account.loaded_tokens == 0
    assert sum(answer.account.waited_for_leader for answer in answers) == 3
    assert all(answer.account.cached_tokens == PROMPT for answer in answers)


def test_a_request_that_waits_for_a_slot_is_loaded_meanwhile(make) -> None:
    store, prompt = holding(make, words(PROMPT, "queued"))
    with server(make, [store], max_running=1) as rig:
        running = [rig.submit(words(100, "long", i), 120) for i in range(2)]  # a slot, and the reserved one's namespace
        while not all(answer.tokens for answer in running[:1]):
            time.sleep(0.01)
        queued = rig.submit(prompt, 4)
        while not outcomes(rig).get("read"):
            assert not running[1].done.is_set(), "it was loaded only when a slot was free"
            time.sleep(0.005)
        rig.wait(queued)
    assert queued.account.tier_outcome == TierOutcome.LOADED


def test_load_for_a_waiting_request_leaves_running_ones_their_pages(make) -> None:
    """The running request needs the pages that are reserved for the load: the load is given up."""
    store, prompt = holding(make, words(PROMPT, "queued"))
    store.waits["get"] = threading.Event()
    with server(make, [store], pages=28 - 8 * make.checkpoint_pages, max_running=1) as rig:
        tiers = rig.engine.scheduler.tiers
        running = [rig.submit(words(100, "long", i), 600) for i in range(2)]  # a slot, and the reserved one's namespace
        while not all(answer.tokens for answer in running[:1]):
            time.sleep(0.005)
        queued = rig.submit(prompt, 4)
        while not tiers.loads.open:
            time.sleep(0.005)
        while not (tiers._given_up or rig.engine.scheduler.preemptions):
            assert not running[0].done.is_set(), "the load left it enough pages"
            time.sleep(0.005)
        store.waits["get"].set()
        for answer in (*running, queued):
            rig.wait(answer)
        assert rig.engine.scheduler.preemptions == 0
    assert queued.account.tier_outcome == TierOutcome.NO_MEMORY


def test_a_cancelled_request_leaves_its_load_to_others(make) -> None:
    store, prompt = holding(make, words(PROMPT, "cancelled"))
    store.waits["get"] = threading.Event()
    with server(make, [store]) as rig:
        rig.submit(prompt, 4)
        request = max(rig.engine.answering.live)
        while not rig.engine.scheduler.tiers.loads.open:
            time.sleep(0.01)
        rig.engine.cancel(request)
        store.waits["get"].set()
        copied(rig)
        assert rig.ask(prompt).account.cached_tokens == PROMPT


def test_colliding_names_are_a_miss(make, monkeypatch) -> None:
    """With names that all prompts share, another prompt's parts are found, compared, and not taken."""
    digests = Names.digests
    monkeypatch.setattr(Names, "digests", lambda self, space, key: digests(self, "", bytes(len(key))))
    store, prompts = MemoryStore(None), [words(PROMPT, i) for i in range(2)]
    with server(make, [store]) as rig:
        first = rig.ask(prompts[0])
    with server(make, [store]) as rig:
        second = rig.ask(prompts[1])
    assert second.account.tier_outcome == TierOutcome.CORRUPT
    assert second.account.cached_tokens == 0
    assert alike(make, prompts, [first, second])


def test_wrong_part_that_cannot_be_deleted_loses_only_itself(make, monkeypatch) -> None:
    store, prompts = Broken(), [words(PROMPT, i) for i in range(2)]
    with server(make, [store]) as rig:
        first = [rig.ask(prompt) for prompt in prompts]
        names = rig.engine.scheduler.tiers._names
    wrong = state_name(names.digests("", key_of(prompts[0])), (PROMPT - 1) // 64)
    read = store.read_into

    def flipped(name, pieces):
        found = read(name, pieces)
        if name == wrong:
            pieces[-1][0] ^= 1
        return found

    monkeypatch.setattr(store, "read_into", flipped)
    store.fails.add("delete")
    with server(make, [store]) as rig:
        again = [rig.ask(prompt) for prompt in prompts]
    assert [answer.account.tier_outcome for answer in again] == [TierOutcome.CORRUPT, TierOutcome.LOADED]
    assert alike(make, prompts * 2, first + again)


def test_copies_give_way_to_requests_that_need_their_pages(make) -> None:
    store = Broken()
    store.waits["put"] = threading.Event()
    with server(make, [store], pages=30) as rig:
        prompts = [words(500 + 64 * i, i) for i in range(6)]
        answers = [rig.submit(prompt, 8) for prompt in prompts]
        threading.Timer(2.0, store.waits["put"].set).start()
        answers = [rig.wait(answer) for answer in answers]
        assert rig.engine.scheduler.tiers.copies.dropped > 0
    assert alike(make, prompts, answers)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_read_only_disk_still_serves_its_parts(make, tmp_path, monkeypatch, error) -> None:
    prompt = words(PROMPT, "disk")
    with server(make, disk(tmp_path)) as rig:
        rig.ask(prompt)

    def fails(*given):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("headwater.tiers.disk._write", fails)
    with server(make, disk(tmp_path)) as rig:
        other = rig.ask(words(PROMPT, "other"))
        copied(rig)
        assert not rig.engine.scheduler.tiers.tiers[0].writable
        again = rig.ask(prompt)
    assert again.account.tier_outcome == TierOutcome.LOADED, "what cannot be written can still be read"
    assert alike(make, [words(PROMPT, "other"), prompt], [other, again])
    assert not [path for path in tmp_path.rglob(".tmp-*")], "nothing unfinished is left"


# -- killed while it stores

WRITER = """
import os, sys
from tests.contract.test_stores import key_of, put, session
from headwater.tiers.disk import DiskStore
from pathlib import Path
store = DiskStore(Path(sys.argv[1]), 400_000)
print("ready", flush=True)
number = int(sys.argv[2]) * 1000
while True:
    put(store, session(key_of(str(number), 12), (4, 10, 12)))
    number += 1
"""


@pytest.mark.parametrize("times", [8, pytest.param(200, marks=pytest.mark.full)])
def test_process_killed_while_storing_leaves_only_whole_parts(tmp_path, times) -> None:
    names = Names(KEY, "fingerprint", 4)
    from tests.contract.test_stores import key_of as made_key

    for moment in range(times):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(moment)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(0.001 * (7 * moment % 50))
            process.send_signal(signal.SIGKILL)
    store = DiskStore(tmp_path, 400_000)
    left = set(store.catalog().entries)
    assert left
    for name in left:
        Sealer(KEY).unseal(name, store.get(name))
    for moment in range(times):
        for number in range(1000 * moment, 1000 * moment + 1000):
            digests = names.digests("", made_key(str(number), 12))
            for end in (4, 10, 12):
                if state_name(digests, end) in left:
                    assert {run_name(digests, *run) for run in runs_of(end, 4)} <= left
    assert sum(name.startswith(RUN) for name in left) < len(left)
    store.close()
