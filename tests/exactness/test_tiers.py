"""A hit from a tier changes no bit of the answer: after a restart, with parts missing or corrupt, in company."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from headwater.account import TierOutcome
from headwater.cache.prefix_cache import PrefixCache
from headwater.config import ServeConfig
from headwater.schedule.sequence import key_of
from headwater.tiers.disk import DiskStore
from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.part import Sealer
from headwater.tiers.store import Store
from tests.covering import cells
from tests.exactness.formats import FORMATS
from tests.exactness.rig import Answer, Make, Rig, words
from tests.exactness.test_matrix import BLOCKS, FAMILIES

KEY = bytes(range(32))
OWN = Fingerprint.of({"probe": "one", "threads": "2"})
OTHER = Fingerprint.of({"probe": "one", "threads": "1"})
AMPLE = 400  # pages besides states
PROMPT = 1300  # tokens: one whole run of KV, and a ragged one


@contextmanager
def server(
    make: Make, stores: list[Store], pages: int = AMPLE, fingerprint: Fingerprint = OWN, **settings
) -> Iterator[Rig]:
    """A rig that keeps states in these stores, and loads whatever they have."""
    config = ServeConfig(tier=("disk:unused",), tier_store="through", tier_timeout=60.0)
    rig = make(pages + 12 * make.checkpoint_pages, **settings)
    rig.engine.use_tiers(stores, KEY, fingerprint, config)
    tiers = rig.engine.scheduler.tiers
    tiers.prefill_seconds = lambda tokens: 1.0 * tokens  # reading always wins
    with rig:
        yield rig
        copied(rig)


def copied(rig: Rig) -> None:
    """Wait until all copies are made."""
    with rig.engine.changed:
        assert rig.engine.changed.wait_for(lambda: not rig.engine.scheduler.tiers.busy, 60)


def disk(folder: Path) -> list[Store]:
    return [DiskStore(folder, None)]


def learnt(rig: Rig) -> None:
    """Wait until the first tier's fingerprints are read."""
    deadline = time.monotonic() + 30
    while not rig.engine.scheduler.tiers.tiers[0].fingerprints.others:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stored_prompt(make: Make, folder: Path) -> Answer:
    with server(make, disk(folder)) as rig:
        return rig.ask(words(PROMPT, "tier"))


def files_of(folder: Path, kind: str) -> list[Path]:
    return sorted(path for path in folder.rglob(f"{kind}*") if path.is_file())


MODELS = [*((family, "auto") for family in FAMILIES), *((BLOCKS, form) for form in FORMATS)]


@pytest.mark.parametrize("dtype", cells(("float32", "bfloat16"), lambda dtype: dtype == "float32"))
@pytest.mark.parametrize(
    ("recipe", "form"), cells(MODELS, lambda recipe, form: form == ("int4" if recipe == BLOCKS else "auto"))
)
def test_a_restarted_server_resumes_from_disk(load, same_bits_as_without_a_cache, tmp_path, recipe, form, dtype):
    make = Make(*load(recipe, dtype, 2, form))
    first = stored_prompt(make, tmp_path)
    with server(make, disk(tmp_path)) as rig:
        again = rig.ask(first.prompt)
        rig.settle()
        turn = rig.ask([*first.everything, *words(40, "turn")])
    assert first.account.cached_tokens == 0
    assert again.account.tier_outcome == TierOutcome.LOADED
    assert again.account.loaded_tokens == again.account.cached_tokens == PROMPT
    assert turn.account.cached_tokens == len(first.everything)
    assert all(same_bits_as_without_a_cache(make, [first, again, turn]))


def test_loaded_prefix_changes_no_bit(load, tmp_path):
    make = Make(*load("qwen3_5", "float32", 2))
    prompt, contents = words(PROMPT, "tier"), []
    for _ in range(2):
        with server(make, disk(tmp_path)) as rig:
            answer = rig.ask(prompt)
            copied(rig)
            cache, pages = rig.engine.scheduler.cache, rig.engine.runner.arena.pages
            with rig.engine.changed:
                at = (PROMPT - 1) // 64 * 64
                held = cache.hold(10**9, "", key_of(prompt), at)
                (tail,) = held.tails
                contents.append(pages[[*held.table, *held.state, *tail.kv, *tail.rows]].clone())
                cache.release(10**9)
    assert answer.account.loaded_tokens
    assert contents[0].equal(contents[1])
    assert contents[0].any()


@pytest.mark.parametrize("kind", ["s", "k", "t"])
def test_a_part_that_is_missing_is_a_shallower_hit_or_a_miss(load, same_bits_as_without_a_cache, tmp_path, kind):
    """Each part of two states and their tails is dropped in turn."""
    make = Make(*load("qwen3_5", "float32", 2))
    with server(make, disk(tmp_path)) as rig:
        rig.ask(words(PROMPT, "tier")[:700])
        first = rig.ask(words(PROMPT, "tier"))
    cached = set()
    for number in range(len(files_of(tmp_path, kind))):
        file = files_of(tmp_path, kind)[number]
        content = file.read_bytes()
        file.unlink()
        with server(make, disk(tmp_path)) as rig:
            again = rig.ask(first.prompt)
        cached.add(again.account.cached_tokens)
        assert same_bits_as_without_a_cache(make, [again]) == [True]
        file.write_bytes(content)
    assert len(cached) > 1
    assert max(cached) <= PROMPT
    if kind == "t":
        assert cached == {(PROMPT - 1) // 64 * 64, PROMPT}


PLACES = (0, 5, 30, 60, 100, 200, -40, -1)


@pytest.mark.parametrize(("at", "kind"), cells(product(PLACES, "sk"), lambda at, kind: "sk".index(kind) == at % 4 % 2))
def test_a_flipped_byte_is_found_and_the_part_is_dropped(load, same_bits_as_without_a_cache, tmp_path, kind, at):
    make = Make(*load("qwen3_5", "float32", 2))
    first = stored_prompt(make, tmp_path)
    flipped = files_of(tmp_path, kind)
    for file in flipped:
        content = bytearray(file.read_bytes())
        content[at] ^= 0x40
        file.write_bytes(content)
    with server(make, disk(tmp_path)) as rig:
        again = rig.ask(first.prompt)
        assert rig.engine.scheduler.tiers.tiers[0].counts["corrupt"] >= 1
    assert again.account.tier_outcome == TierOutcome.CORRUPT
    assert again.account.cached_tokens == 0
    assert same_bits_as_without_a_cache(make, [again]) == [True]
    with server(make, disk(tmp_path)) as rig:  # the dropped part was stored again
        assert rig.ask(first.prompt).account.tier_outcome == TierOutcome.LOADED


def test_parts_that_are_exchanged_are_found(load, same_bits_as_without_a_cache, tmp_path):
    make = Make(*load("qwen3_5", "float32", 2))
    with server(make, disk(tmp_path)) as rig:
        answers = [rig.ask(words(PROMPT, i)) for i in range(2)]
    for kind in ("s", "k"):
        one, *_, other = files_of(tmp_path, kind)
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
    with server(make, disk(tmp_path)) as rig:
        again = [rig.ask(answer.prompt) for answer in answers]
        assert rig.engine.scheduler.tiers.tiers[0].counts["corrupt"] >= 2
    assert all(same_bits_as_without_a_cache(make, again))


def asked_after_eviction(make: Make, folder: Path, evict: Callable[[PrefixCache], object]) -> tuple[Answer, int]:
    """Ask a stored prompt again after parts of it were evicted from memory; return how many the tier was read for."""
    prompt = words(PROMPT, "tier")
    with server(make, disk(folder)) as rig:
        rig.ask(prompt)
        rig.settle()
        copied(rig)
        with rig.engine.changed:
            evict(rig.engine.scheduler.cache)
        again = rig.ask(prompt)
        return again, rig.engine.scheduler.tiers.tiers[0].counts["read"]


def evict_states(cache: PrefixCache) -> None:
    for node in [node for node in cache.index if node.checkpoint is not None]:
        cache.tails.drop(node)
        cache.pool.states.give(cache.index.drop(node))


def test_only_state_and_tail_are_read_if_their_kv_is_in_memory(load, same_bits_as_without_a_cache, tmp_path):
    make = Make(*load("qwen3_5", "float32", 2))
    again, parts = asked_after_eviction(make, tmp_path, evict_states)
    assert (parts, again.account.loaded_tokens, again.account.cached_tokens) == (2, PROMPT, PROMPT)
    assert same_bits_as_without_a_cache(make, [again]) == [True]


def test_run_partly_in_memory_is_read_whole_and_checked(load, same_bits_as_without_a_cache, tmp_path):
    make = Make(*load("qwen3_5", "float32", 2))
    first = stored_prompt(make, tmp_path)
    with server(make, disk(tmp_path)) as rig:
        tiers = rig.engine.scheduler.tiers
        tiers.prefill_seconds, always = lambda tokens: 0.0, tiers.prefill_seconds
        part = rig.ask(first.prompt[:700])  # computed
        tiers.prefill_seconds = always
        again = rig.ask(first.prompt)
        assert tiers.tiers[0].counts["corrupt"] == 0
    assert part.account.loaded_tokens == 0
    assert again.account.loaded_tokens == PROMPT - 700
    assert same_bits_as_without_a_cache(make, [again]) == [True]


@pytest.mark.parametrize("at", cells(PLACES, lambda at: at in (5, 200)))
def test_damaged_tail_is_computed_again_and_stored_again(load, same_bits_as_without_a_cache, tmp_path, at):
    make = Make(*load("qwen3_5", "float32", 2))
    first = stored_prompt(make, tmp_path)
    for file in files_of(tmp_path, "t"):
        content = bytearray(file.read_bytes())
        content[at] ^= 0x40
        file.write_bytes(content)
    with server(make, disk(tmp_path)) as rig:
        again = rig.ask(first.prompt)
        assert rig.engine.scheduler.tiers.tiers[0].counts["corrupt"] >= 1
    assert (again.account.tier_outcome, again.account.cached_tokens) == (TierOutcome.LOADED, (PROMPT - 1) // 64 * 64)
    with server(make, disk(tmp_path)) as rig:
        third = rig.ask(first.prompt)
    assert third.account.cached_tokens == PROMPT
    assert all(same_bits_as_without_a_cache(make, [again, third]))


def test_evicted_tail_is_read_again_without_its_prefix(load, same_bits_as_without_a_cache, tmp_path):
    make = Make(*load("qwen3_5", "float32", 2))
    again, parts = asked_after_eviction(make, tmp_path, lambda cache: list(map(cache.tails.evict, [*cache.tails])))
    assert (parts, again.account.loaded_tokens, again.account.cached_tokens) == (1, PROMPT % 64, PROMPT)
    assert same_bits_as_without_a_cache(make, [again]) == [True]


def test_rows_of_another_tail_under_a_valid_seal_change_bits(load, same_bits_as_without_a_cache, tmp_path):
    """The control of these tests: a part whose digest is right, with the content of another prompt's tail."""
    make = Make(*load("qwen3_5", "float32", 2))
    with server(make, disk(tmp_path)) as rig:
        prompts = [rig.ask(words(PROMPT, i), 1).prompt for i in range(2)]
    sealer, parts = Sealer(KEY), {}
    for file in files_of(tmp_path, "t"):
        part = sealer.unseal(file.name, file.read_bytes())
        if bytes(part.key) in map(key_of, prompts):
            parts[file] = part
    (one, part), (_, other) = parts.items()
    one.write_bytes(b"".join(sealer.seal(one.name, replace(part, payload=other.payload))))
    with server(make, disk(tmp_path)) as rig:
        again = [rig.ask(prompt) for prompt in prompts]
    assert [answer.account.cached_tokens for answer in again] == [PROMPT, PROMPT]
    assert sorted(same_bits_as_without_a_cache(make, again)) == [False, True]


def test_loads_continue_among_other_requests_and_in_short_memory(load, same_bits_as_without_a_cache, tmp_path):
    make = Make(*load("qwen3_5", "float32", 2))
    prompts = [words(500 + 40 * i, i) for i in range(8)]
    with server(make, disk(tmp_path)) as rig:
        for prompt in prompts:
            rig.ask(prompt)
    with server(make, disk(tmp_path), pages=40) as rig:
        answers = [rig.submit([*prompt, *words(30, "more", i)], 12) for i, prompt in enumerate(2 * prompts)]
        for answer in answers:
            rig.wait(answer)
    assert sum(answer.account.loaded_tokens > 0 for answer in answers) >= 1
    assert all(same_bits_as_without_a_cache(make, answers))


def test_another_fingerprint_or_namespace_shares_nothing(load, tmp_path, caplog):
    make = Make(*load("qwen3_5", "float32", 2))
    first = stored_prompt(make, tmp_path)
    with caplog.at_level("INFO"), server(make, disk(tmp_path), fingerprint=OTHER) as rig:
        copied(rig)
        learnt(rig)
        assert rig.ask(first.prompt).account.tier_outcome == TierOutcome.OTHER_FINGERPRINT
        assert rig.ask(words(PROMPT, "new")).account.tier_outcome == TierOutcome.MISS
        copied(rig)
        (stats,) = rig.engine.scheduler.tiers.figures().tiers
        assert 0 < stats.other_states < stats.states
    assert f"{tmp_path} holds 1 states of another fingerprint: model '', other threads" in caplog.text
    with server(make, disk(tmp_path)) as rig:
        assert rig.ask(first.prompt, namespace="other").account.tier_outcome == TierOutcome.MISS
        assert rig.ask(first.prompt).account.tier_outcome == TierOutcome.LOADED


def test_a_folder_that_is_gone_costs_no_request(load, same_bits_as_without_a_cache, tmp_path):
    make = Make(*load("qwen3_5", "float32", 2))
    first = stored_prompt(make, tmp_path / "tier")
    with server(make, disk(tmp_path / "tier")) as rig:
        os.rename(tmp_path / "tier", tmp_path / "elsewhere")
        again = rig.ask(first.prompt)
    assert again.account.cached_tokens == 0
    assert same_bits_as_without_a_cache(make, [again]) == [True]
