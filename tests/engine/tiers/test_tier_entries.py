"""Entries of the MTP head in tiers: after a restart the head drafts as if the prefix had stayed in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from headwater.request import Drafting
from headwater.schedule.handover import Handover
from headwater.schedule.sequence import key_of
from headwater.tiers.memory import MemoryStore
from headwater.tiers.store import Store
from tests.cluster.fake import until
from tests.cluster.test_pulls import Worker, pool
from tests.engine.tiers.test_tier_io import Broken
from tests.exactness.rig import Answer, Make, Rig, words
from tests.exactness.test_tiers import copied, server
from tests.models.test_mtp import Pass, always_drafting, make, with_head  # noqa: F401  fixtures

PROMPT = words(1300, "entries")  # a whole run of KV, and a ragged one
END = (len(PROMPT) - 1) // 64 * 64


def parts(store: Store, kind: str) -> int:
    return sum(name.startswith(kind) for name in store.catalog().entries)


def ask(monkeypatch: pytest.MonkeyPatch, rig: Rig, prompt: list[int] = PROMPT) -> tuple[Answer, list[Pass]]:
    """The answer to a prompt, and the passes of the head that drafted for it."""
    with always_drafting(monkeypatch, rig) as passes:
        answer = rig.ask(prompt, 12, drafting=Drafting(tokens=2), keep_output=False)
        copied(rig)
        return answer, list(passes)


def same(one: list[Pass], other: list[Pass]) -> bool:
    return [p.positions for p in one] == [p.positions for p in other] and all(
        torch.equal(a.logits, b.logits) for a, b in zip(one, other, strict=True)
    )


@contextmanager
def drafting(made: Make, store: Store, speculation: str = "mtp", **more) -> Iterator[Rig]:
    with server(made, [store], speculation=speculation, **more) as rig:
        yield rig


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.full)])
def test_after_a_restart_the_head_drafts_as_with_the_prefix_in_memory(make, monkeypatch, family) -> None:  # noqa: F811
    made, store = make(family), MemoryStore(None)
    with drafting(made, store) as rig:
        ask(monkeypatch, rig)
        memory, in_memory = ask(monkeypatch, rig)
        assert (memory.account.cached_tokens, memory.account.loaded_tokens) == (len(PROMPT), 0)
    assert (parts(store, "m"), parts(store, "k"), parts(store, "t")) == (3, 2, 1)
    with drafting(made, store) as rig:
        loaded, from_tier = ask(monkeypatch, rig)
    assert loaded.account.loaded_tokens == len(PROMPT)
    assert loaded.same_bits(memory)
    assert in_memory
    assert same(from_tier, in_memory)
    for name in [name for name in store.catalog().entries if name.startswith("m")]:
        store.delete([name])
    with drafting(made, store) as rig:
        without, other = ask(monkeypatch, rig)
        assert rig.engine.scheduler.tiers.tiers[0].counts["corrupt"] == 0
    assert without.account.loaded_tokens == len(PROMPT), "it is a hit"
    assert without.same_bits(memory)
    assert not same(other, in_memory), "the head lacks the prompt"
    assert parts(store, "m") == 0, "entries that were not there are not stored"


def test_servers_with_and_without_a_head_share_a_store(make, monkeypatch) -> None:  # noqa: F811
    made, store = make("qwen3_5"), MemoryStore(None)
    with drafting(made, store) as rig:
        first, _ = ask(monkeypatch, rig)
    with server(made, [store], speculation="off") as rig:
        plain = rig.ask(PROMPT, 12, keep_output=False)
    assert plain.account.loaded_tokens == len(PROMPT)
    assert plain.same_bits(first)
    store = MemoryStore(None)
    with server(made, [store], speculation="off") as rig:
        rig.ask(PROMPT, 12, keep_output=False)
    assert parts(store, "m") == 0
    with drafting(made, store) as rig:
        again, _ = ask(monkeypatch, rig)
    assert again.account.loaded_tokens == len(PROMPT)
    assert again.same_bits(first)


@pytest.mark.parametrize("at", [80, -40, None])
def test_damaged_entries_cost_drafts_and_no_hit(make, monkeypatch, at) -> None:  # noqa: F811
    made, store = make("qwen3_5"), MemoryStore(None)
    with drafting(made, store) as rig:
        first, _ = ask(monkeypatch, rig)
    for name in [name for name in store._content if name.startswith("m")]:
        content = bytearray(store._content[name])
        if at is None:
            del content[-50:]
        else:
            content[at] ^= 1
        store._content[name] = bytes(content)
    with drafting(made, store) as rig:
        again, _ = ask(monkeypatch, rig)
        assert rig.engine.scheduler.tiers.tiers[0].counts["corrupt"] == 3
    assert again.account.loaded_tokens == len(PROMPT)
    assert again.same_bits(first)


def test_tokens_after_a_loaded_prefix_are_stored_with_their_entries(make, monkeypatch) -> None:  # noqa: F811
    """A longer prompt is loaded in part and computed in part: a third server has the same drafts for it."""
    made, store, longer = make("qwen3_5"), MemoryStore(None), [*PROMPT, *words(900, "more")]
    with drafting(made, store) as rig:
        ask(monkeypatch, rig)
    with drafting(made, store) as rig:
        ask(monkeypatch, rig, longer)
        memory, in_memory = ask(monkeypatch, rig, longer)
    with drafting(made, store) as rig:
        loaded, from_tier = ask(monkeypatch, rig, longer)
    assert loaded.account.loaded_tokens == loaded.account.cached_tokens == len(longer)
    assert loaded.same_bits(memory)
    assert same(from_tier, in_memory)


def test_entries_are_evicted_with_their_runs_and_tails(make, monkeypatch) -> None:  # noqa: F811
    made = make("qwen3_5")
    store = MemoryStore(None)
    with drafting(made, store) as rig:
        ask(monkeypatch, rig)
        size = store.usage().bytes
    store = MemoryStore(int(2.5 * size))
    with drafting(made, store) as rig:
        for i in range(5):
            ask(monkeypatch, rig, words(1300, "evicted", i))
            names = set(store.catalog().entries)
            assert {name[1:] for name in names if name[0] == "m"} == {name[1:] for name in names if name[0] in "kt"}
    assert store.usage().evicted > 0


def test_a_store_that_fails_while_entries_are_read_costs_no_hit(make, monkeypatch) -> None:  # noqa: F811
    class Failing(Broken):
        def read_into(self, name, pieces):
            if name[0] == "m":
                self.fails.add("get")
            try:
                return super().read_into(name, pieces)
            finally:
                self.fails.discard("get")

    made, store = make("qwen3_5"), Failing()
    with drafting(made, store) as rig:
        first, _ = ask(monkeypatch, rig)
    with drafting(made, store) as rig:
        again, _ = ask(monkeypatch, rig)
    assert again.account.loaded_tokens == len(PROMPT)
    assert again.same_bits(first)


@pytest.mark.parametrize("is_followed", [False, True], ids=["pulled", "followed"])
def test_entries_are_pulled_with_a_prefix(make, monkeypatch, is_followed) -> None:  # noqa: F811
    made = make("qwen3_5")
    a, b = (Worker(made, speculation="mtp") for _ in "ab")
    with pool(a, b):
        ask(monkeypatch, a.rig)
        memory, in_memory = ask(monkeypatch, a.rig)
        handover = Handover(peers=(a.incarnation,))
        if is_followed:
            handover = Handover(follows=b.rig.engine.follow(a.incarnation, "", key_of(memory.prompt)))
            until(lambda: b.cache.match(key_of(memory.prompt), END + 1).checkpoint_tokens == END)
        b.rig.engine.submit = partial(b.rig.engine.submit, handover=handover)
        pulled, from_peer = ask(monkeypatch, b.rig)
    assert pulled.account.loaded_tokens == (END if is_followed else len(PROMPT))
    assert memory.account.cached_tokens == len(PROMPT)
    assert pulled.same_bits(memory)
    assert in_memory
    assert same(from_peer, in_memory)
