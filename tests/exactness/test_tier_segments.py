"""A segment from a tier is the one that was stored, to the bit, and a request composed of it is answered alike."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.account import TierOutcome
from headwater.cache.segments.compose import MAX_TOKEN_ID
from headwater.engine.tiers.prefix import PrefixParts
from headwater.request import Fidelity
from headwater.schedule.sequence import Purpose
from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.names import Names
from headwater.tiers.redis import RedisStore
from tests.covering import cells
from tests.exactness.rig import DOCUMENTS, FAST, LEAD, Answer, Make, Rig, prompt_of
from tests.exactness.test_matrix import FAMILIES
from tests.exactness.test_tiers import OTHER, OWN, copied, disk, files_of, server
from tests.redis_server import redis_server

INTERIORS = sum(len(document) - 16 for document in DOCUMENTS)
SEGMENT = "g"
OFF = {"healing": "off"}
SOME = ("qwen3_5", "qwen3", "qwen3_window", "mamba2", "kimi_linear")


def ask(rig: Rig, documents: list[list[int]] = DOCUMENTS, **more) -> Answer:
    return rig.wait(submit(rig, documents, **more))


def submit(rig: Rig, documents: list[list[int]] = DOCUMENTS, max_tokens: int = 8, **more) -> Answer:
    prompt, spans = prompt_of(documents)
    return rig.submit(prompt, max_tokens, segments=spans, **FAST, **more)


def built(rig: Rig) -> int:
    """Return how many tokens were computed for segments."""
    return rig.engine.scheduler.computed[Purpose.SEGMENT]


def contents(rig: Rig) -> dict[bytes, torch.Tensor]:
    """Return the bytes of each segment in memory, by its key."""
    pages = rig.engine.runner.arena.pages
    with rig.engine.changed:
        ready = [one for one in rig.engine.scheduler.cache.segments if one.ready]
        return {one.key.encoded: pages[[*one.kv, *one.state, *one.transition]].clone() for one in ready}


@pytest.fixture
def make(load) -> Make:
    return Make(*load("qwen3_5", "float32", 2), OFF)


@pytest.mark.parametrize("recipe", cells(FAMILIES, lambda recipe: recipe in SOME))
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_a_restarted_server_composes_of_segments_from_disk(load, tmp_path: Path, recipe: str, dtype: str) -> None:
    make = Make(*load(recipe, dtype, 2), OFF)
    with server(make, disk(tmp_path)) as rig:
        first = ask(rig)
        stored = contents(rig)
    assert len(files_of(tmp_path, SEGMENT)) == len(stored) == 3
    for file in files_of(tmp_path, "s"):  # the leading part is computed in both
        file.unlink()
    with server(make, disk(tmp_path)) as rig:
        again, turned = ask(rig), ask(rig, DOCUMENTS[::-1])
        assert built(rig) == 0
        loaded = contents(rig)
    with make(1500) as rig:
        other = ask(rig, DOCUMENTS[::-1])
    assert stored.keys() == loaded.keys()
    assert all(stored[key].equal(loaded[key]) for key in stored)
    assert all(content.any() for content in stored.values())
    assert first.account.cold_tokens == INTERIORS
    assert first.account.tier_outcome == TierOutcome.MISS
    account = again.account
    assert (account.tier_outcome, account.loaded_segments, account.segments) == (TierOutcome.LOADED, 3, 3)
    assert account.loaded_tokens == account.composed_tokens == account.cached_tokens == INTERIORS
    assert (account.cold_tokens, account.loaded_from) == (0, "disk")
    assert account.load_seconds > 0
    assert turned.account.loaded_segments == 0, "they are in memory"
    assert again.same_bits(first)
    assert turned.same_bits(other)


def test_segments_come_back_from_redis(make: Make, tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        with server(make, [RedisStore(redis.url, None)]) as rig:
            first, stored = ask(rig), contents(rig)
        with server(make, [RedisStore(redis.url, None)]) as rig:
            again, loaded = ask(rig), contents(rig)
            assert built(rig) == 0
    assert (again.account.loaded_segments, again.account.loaded_from) == (3, "redis")
    assert stored.keys() == loaded.keys()
    assert all(stored[key].equal(loaded[key]) for key in stored)
    assert again.same_bits(first)


def test_another_namespace_fingerprint_or_width_is_built(make: Make, tmp_path: Path) -> None:
    def asked(fingerprint: Fingerprint = OWN, documents: list[list[int]] = DOCUMENTS, **more) -> tuple[int, int]:
        """Return how many segments a new server loads, and how many tokens of others it computes."""
        with server(make, disk(tmp_path), fingerprint=fingerprint) as rig:
            return ask(rig, documents, **more).account.loaded_segments, built(rig)

    made = sum(len(document) - 8 for document in DOCUMENTS)
    assert asked() == (0, made)
    assert asked() == (3, 0)
    assert asked(fingerprint=OTHER) == (0, made)
    assert asked(namespace="other") == (0, made)
    changed = [*DOCUMENTS[:2], [DOCUMENTS[2][0] + 1, *DOCUMENTS[2][1:]]]
    assert asked(documents=changed) == (2, len(DOCUMENTS[2]) - 8)
    with server(make, disk(tmp_path)) as rig:
        prompt, spans = prompt_of(DOCUMENTS[:1])
        wide = rig.ask(prompt, segments=spans, fidelity=Fidelity.W16)
        assert (wide.account.loaded_segments, built(rig)) == (0, len(DOCUMENTS[0]) - 16)


@pytest.mark.parametrize("at", [0, 5, 60, 95, 120, 400, -40, -1, None])
def test_a_part_that_is_damaged_or_gone_is_built_and_stored_again(make: Make, tmp_path: Path, at: int | None) -> None:
    with server(make, disk(tmp_path)) as rig:
        first = ask(rig)
    for file in files_of(tmp_path, "s"):
        file.unlink()
    files = files_of(tmp_path, SEGMENT)
    content = bytearray(files[0].read_bytes())
    if at is None:
        files[0].unlink()
    else:
        content[at] ^= 0x40
        files[0].write_bytes(content)
    with server(make, disk(tmp_path)) as rig:
        again = ask(rig)
        assert built(rig) in [len(document) - 8 for document in DOCUMENTS], "one, and no other"
        assert rig.engine.scheduler.tiers.tiers[0].counts["corrupt"] == (at is not None)
    assert (again.account.loaded_segments, again.account.segments) == (2, 3)
    assert again.account.cold_tokens > 0
    assert again.same_bits(first)
    with server(make, disk(tmp_path)) as rig:
        assert ask(rig).account.loaded_segments == 3


def test_parts_that_are_exchanged_or_cut_are_built(make: Make, tmp_path: Path) -> None:
    with server(make, disk(tmp_path)) as rig:
        first = ask(rig)
    for file in files_of(tmp_path, "s"):
        file.unlink()
    one, other, third = files_of(tmp_path, SEGMENT)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    third.write_bytes(third.read_bytes()[:-100])
    with server(make, disk(tmp_path)) as rig:
        again = ask(rig)
        assert rig.engine.scheduler.tiers.tiers[0].counts["corrupt"] == 3
    assert again.account.tier_outcome == TierOutcome.CORRUPT
    assert again.account.loaded_segments == 0
    assert again.same_bits(first)


def test_an_exact_request_takes_nothing_of_loaded_segments(
    make: Make, same_bits_as_without_a_cache, tmp_path: Path
) -> None:
    with server(make, disk(tmp_path)) as rig:
        first = ask(rig)
    with server(make, disk(tmp_path)) as rig:
        ask(rig)
        copied(rig)
        exact = rig.ask(first.prompt)
    assert exact.account.loaded_segments == exact.account.segments == 0
    assert same_bits_as_without_a_cache(make, [exact]) == [True]


@pytest.mark.parametrize("guards", ["both", "only names", "none"])
def test_a_composed_session_is_never_served_to_an_exact_request(
    make: Make, same_bits_as_without_a_cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guards: str
) -> None:
    """A composed prefix is not stored, and its marks give other names. With names of only token ids it is served."""
    if guards != "both":
        monkeypatch.setattr("headwater.engine.tiers.copies.is_marked", lambda key: False)
    if guards == "none":
        digests, prefix_parts = Names.digests, PrefixParts.parts
        monkeypatch.setattr(Names, "digests", lambda names, space, key: digests(names, space, unmarked(key)))
        monkeypatch.setattr(
            PrefixParts, "parts", lambda parts, space, key, *given: prefix_parts(parts, space, unmarked(key), *given)
        )
    with server(make, disk(tmp_path)) as rig:
        composed = ask(rig)
        copied(rig)
    assert bool(files_of(tmp_path, "s")) == (guards != "both")
    with server(make, disk(tmp_path)) as rig:
        exact = rig.ask(composed.prompt)
    served = exact.account.cached_tokens > len(LEAD)
    assert served == (guards == "none")
    assert same_bits_as_without_a_cache(make, [exact]) == [guards != "none"]


def unmarked(key: bytes) -> bytes:
    """Return the token ids of a key without their marks."""
    return (np.frombuffer(key, np.uint32) & MAX_TOKEN_ID).tobytes()
