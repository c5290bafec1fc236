"""Tiers below an arena on a card change no bit: pages are staged, and copies are made when they are waited for.

The arena is on the CPU. `test_gpu_matrix.py` has kernels of cards, in Triton's interpreter; `tests/card` has a card.
"""

from collections import Counter
from pathlib import Path

import pytest

from headwater.tiers.memory import MemoryStore
from tests.cluster.test_pulls import Worker, pool
from tests.covering import cells
from tests.exactness.rig import Make, words
from tests.exactness.test_tier_places import loaded_while_memory_evicts
from tests.exactness.test_tier_segments import DOCUMENTS, OFF, ask, built, contents
from tests.exactness.test_tiers import FAMILIES, PROMPT, copied, disk, files_of, server, stored_prompt
from tests.staging import NeverWaits, stage

SOME = ("qwen3_5", "qwen3_window", "kimi_linear")
DTYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.full)]


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return stage(monkeypatch)


@pytest.mark.parametrize("recipe", cells(FAMILIES, lambda recipe: recipe in SOME))
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefixes_and_segments_come_back_to_the_bit(
    load, same_bits_as_without_a_cache, staged, tmp_path: Path, recipe: str, dtype: str
) -> None:
    """Stored, evicted with their process, loaded by the next one, and by one that does not stage."""
    make = Make(*load(recipe, dtype, 2), OFF)
    with server(make, disk(tmp_path)) as rig:
        first, composed = rig.ask(words(PROMPT, "staged")), ask(rig)
        copied(rig)
        stored = contents(rig)
    assert staged["copied"] > 0
    with server(make, disk(tmp_path)) as rig:
        again = rig.ask(first.prompt)
        turn = rig.ask([*first.everything, *words(40, "turn")])
        recomposed, loaded = ask(rig), contents(rig)
        assert built(rig) == 0
    assert again.account.loaded_tokens == again.account.cached_tokens == PROMPT
    assert recomposed.account.loaded_segments == len(DOCUMENTS)
    assert stored.keys() == loaded.keys()
    assert all(stored[key].equal(loaded[key]) and stored[key].any() for key in stored)
    assert recomposed.same_bits(composed)
    assert all(same_bits_as_without_a_cache(make, [first, again, turn]))


def test_parts_are_those_that_are_stored_in_place(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of both are equal, byte for byte, but for the seconds that computing took."""
    make = Make(*load("qwen3_5", "float32", 2))
    monkeypatch.setattr("headwater.engine.tiers.io.TierIO.prefill_seconds", lambda io, tokens: 1.0 * tokens)
    stored_prompt(make, tmp_path / "in place")
    stage(monkeypatch)
    stored_prompt(make, tmp_path / "staged")
    for kind in "sk":
        both = [files_of(tmp_path / place, kind) for place in ("in place", "staged")]
        assert [file.name for file in both[0]] == [file.name for file in both[1]]
        assert [file.read_bytes() for file in both[0]] == [file.read_bytes() for file in both[1]]


@pytest.mark.parametrize("kind", ["s", "k", "g"])
def test_a_flipped_byte_is_refused(load, same_bits_as_without_a_cache, staged, tmp_path: Path, kind: str) -> None:
    make = Make(*load("qwen3_5", "float32", 2), OFF)
    with server(make, disk(tmp_path)) as rig:
        first, composed = rig.ask(words(PROMPT, "staged")), ask(rig)
    for file in files_of(tmp_path, kind):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0x40
        file.write_bytes(content)
    with server(make, disk(tmp_path)) as rig:
        again, recomposed = rig.ask(first.prompt), ask(rig)
        assert rig.engine.scheduler.tiers.tiers[0].counts["corrupt"] >= 1
    assert (again.account.cached_tokens == 0) == (kind != "g")
    assert recomposed.same_bits(composed)
    assert same_bits_as_without_a_cache(make, [again]) == [True]


def test_a_copy_that_is_not_waited_for_is_found(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the second server resumes before its pages have the loaded content."""
    make = Make(*load("qwen3_5", "float32", 2))
    first = stored_prompt(make, tmp_path)
    with monkeypatch.context() as patch:
        stage(patch, NeverWaits)
        with server(make, disk(tmp_path)) as rig:
            again = rig.ask(first.prompt)
    assert again.account.cached_tokens == PROMPT
    assert not again.same_bits(first)


def test_staged_loads_are_exact_while_memory_evicts(load, same_bits_as_without_a_cache, staged) -> None:
    """Prefixes go to the host's memory and come back, several times over, while another request computes."""
    make, store = Make(*load("qwen3_5", "float32", 2)), MemoryStore(10**9)
    prompts = [words(PROMPT, "evicted", i) for i in range(3)]
    answers = loaded_while_memory_evicts(make, [store], prompts)
    assert staged["lanes"] <= 3, "two readers and the writer"
    assert all(same_bits_as_without_a_cache(make, answers))


def test_a_pulled_prefix_changes_no_bit(load, same_bits_as_without_a_cache, staged) -> None:
    make = Make(*load("qwen3_5", "float32", 2))
    a, b = Worker(make), Worker(make)
    with pool(a, b):
        first = a.ask(words(PROMPT, "pull"))
        again = b.ask(first.prompt, a)
    assert again.account.loaded_from == "peer"
    assert again.account.loaded_tokens == PROMPT
    assert all(same_bits_as_without_a_cache(make, [first, again]))
