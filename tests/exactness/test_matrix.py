"""A hit changes no bit of the answer: family x format of weights x way to the hit, against a server without a cache."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

from headwater import kernels
from headwater.cache.lease import OpenPlan
from headwater.cache.node import MidPage, StoredTail
from headwater.cache.tails import Tails
from headwater.memory.slots import StateMemory
from headwater.mixers.batch import StepBatch
from headwater.mixers.slices import Slice
from headwater.models.load import load_model
from tests.checkpoints import TRAINED
from tests.covering import cells
from tests.exactness.formats import FORMATS
from tests.exactness.rig import Answer, Make, Rig, words
from tests.exactness.scenarios import AMPLE, SCENARIOS, chat_turn
from tests.support import FULL

FAMILIES = (
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3", "qwen3_window", "granite", "bamba", "mamba2", "minimax", "ring",
    "jamba", "kimi_linear", "ling", "ling_limits", "ling_2_5", "falcon_h1", "nemotron_h", "lfm2", "lfm2_moe",
    "gpt_oss", "olmo_hybrid", "lara_mini",
)  # fmt: skip
# their mixers are another family's: all but one scenario is behind the mark
ALIKE = (
    "qwen3_5_moe", "qwen3_next", "bamba", "minimax", "ling", "ling_limits", "ling_2_5", "falcon_h1", "nemotron_h",
    "lfm2_moe", "olmo_hybrid", "lara_mini",
)  # fmt: skip
BRIEF = ("chat_turn", "with_seven_other_requests_running")
# they resume from checkpoints as qwen3_5 does: the scenarios that differ in cached positions are behind the mark
RESUMED_ALIKE = ("granite", "ring", "jamba", "kimi_linear", "lfm2")
FURTHER = (
    ("qwen3_5_wide", "auto", "bfloat16", 2, "chat_turn"),
    (TRAINED, "auto", "float32", 2, "chat_turn"),
    ("qwen3_5_blocks", "int4", "float32", 3, "chat_turn"),
    ("qwen3_5_blocks", "Q3_K and others", "bfloat16", 2, "chat_turn"),
    ("gpt_oss_mxfp4", "auto", "bfloat16", 2, "chat_turn"),
)
DTYPES = ("float32", "bfloat16")
BLOCKS = "qwen3_5_blocks"  # whose inputs are blocks of every format
ROOT = Path(__file__).parents[2]


CELLS = [
    *product(
        (*FAMILIES, "qwen3_5_wide", TRAINED, "mamba", "qwen3_5_bench", "gpt_oss_mxfp4"),
        ("auto",),
        DTYPES,
        (2, 1, 3),
        SCENARIOS,
    ),
    *product((BLOCKS,), FORMATS, DTYPES, (1, 2, 3), SCENARIOS),
    *product(FAMILIES, ("int8", "int4"), DTYPES, (1, 2, 3), BRIEF),
]


def is_quick(recipe: str, *cell: object) -> bool:
    *kind, scenario = cell
    if recipe not in FAMILIES or kind != ["auto", "float32", 2]:
        return (recipe, *cell) in FURTHER
    known = BRIEF[1:] if recipe in ALIKE else BRIEF if recipe in RESUMED_ALIKE else SCENARIOS
    return scenario in known or (recipe, scenario) == ("kimi_linear", "after_preemption")


@pytest.mark.parametrize(("recipe", "form", "dtype", "threads", "scenario"), cells(CELLS, is_quick))
def test_a_hit_changes_no_bit(load, same_bits_as_without_a_cache, recipe, form, dtype, threads, scenario):
    loaded, check = load(recipe, dtype, threads, form)
    assert check.deterministic, check.broken_by
    make = Make(loaded, check)
    answers = SCENARIOS[scenario](make)
    assert any(answer.account.cached_tokens for answer in answers)
    assert all(same_bits_as_without_a_cache(make, answers))


@pytest.mark.parametrize("scenario", BRIEF)
@pytest.mark.parametrize(
    ("recipe", "form"),
    [
        ("qwen3_5", "auto"),
        pytest.param(BLOCKS, "int4", marks=pytest.mark.full),
        pytest.param(BLOCKS, "Q4_K and others", marks=pytest.mark.full),
        *(pytest.param(recipe, "auto", marks=pytest.mark.full) for recipe in ("granite", "kimi_linear", "qwen3_5_moe")),
    ],
)
def test_a_hit_changes_no_bit_without_kernels(
    load_apart, same_bits_as_without_a_cache, monkeypatch, recipe, form, scenario
):
    """Torch computes everything if numba is not installed."""
    monkeypatch.setattr(kernels, "available", lambda: False)
    loaded, check = load_apart(recipe, "float32", 2, form)
    assert (check.deterministic, check.mode) == (True, "tiled")
    make = Make(loaded, check)
    answers = SCENARIOS[scenario](make)
    assert any(answer.account.cached_tokens for answer in answers)
    assert all(same_bits_as_without_a_cache(make, answers))


POLICIES = product(("headwater", "branch", "every_block(2)"), ("lru", "seglen"))


@pytest.mark.parametrize(
    ("placement", "eviction"), cells(POLICIES, lambda *pair: ("lru" in pair) == ("branch" in pair))
)
def test_no_policy_changes_a_bit(load, same_bits_as_without_a_cache, eviction, placement):
    loaded, check = load("qwen3_5", "float32", 2)
    make = Make(loaded, check, {"eviction": eviction, "placement": placement, "max_tokens_per_step": 256})
    with make(64 + 12 * make.checkpoint_pages) as rig:
        head = words(500, "head")
        answers = [rig.ask(head + words(200 + 90 * (i % 3), i % 4), 70 if FULL else 30) for i in range(12)]
    assert any(answer.account.cached_tokens for answer in answers)
    assert all(same_bits_as_without_a_cache(make, answers))


@pytest.mark.parametrize("page_size", [128, 192])
def test_no_page_size_changes_a_bit(load, same_bits_as_without_a_cache, page_size):
    loaded, check = load("qwen3_5", "float32", 2)
    make = Make(load_model(loaded.path, "float32", page_size=page_size), check, {"page_size": page_size})
    with make(500) as rig:
        prompt = words(700, "pages")
        answers = [rig.ask(prompt, 70), rig.ask(prompt, 70)]
        rig.settle()
        answers.append(rig.ask(answers[1].everything + words(50, "turn"), 30))
    assert [a.account.cached_tokens for a in answers[1:]] == [700, 770]
    assert all(same_bits_as_without_a_cache(make, answers))


# -- controls: without what exactness is made of, the comparison must fail ------------------------------------


def test_decode_reuse_raw_changes_bits(load, same_bits_as_without_a_cache):
    loaded, check = load("qwen3_5", "float32", 2)
    make = Make(loaded, check, {"decode_reuse": "raw"})
    assert not all(same_bits_as_without_a_cache(make, chat_turn(make)))


def as_rows_of_prompts(batch: StepBatch) -> StepBatch:
    """Let the rows of decoding sequences follow as slices if one of them has several rows."""
    if not batch.has_chains:
        return batch
    slots, firsts, _ = batch.decode_sequences
    positions = [length - 1 for length in batch.decode_lengths]
    slices = [
        Slice(batch.n_prefill + first, end - first, positions[first], slot, batch.decode_tables[end - 1], page)
        for slot, (first, end) in zip(slots.tolist(), pairwise(firsts.tolist()), strict=True)
        for page in [positions[first] // 64]
    ]
    none = torch.empty(0, dtype=torch.int64)
    return replace(batch, slices=(*batch.slices, *slices), decode_slot_B=none, decode_tables=(), parents=())


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_replay_by_rows_of_prompts_is_seen(load, same_bits_as_without_a_cache, monkeypatch, name):
    """A preempted answer is replayed among others that decode, and prompts."""
    loaded, check = load(name, "float32", 2)
    forward, slices = type(loaded.model).forward, []

    def replayed(model, batch, *memory, **hidden):
        by_prompts = as_rows_of_prompts(batch)
        slices.append(len(by_prompts.slices) - len(batch.slices))
        return forward(model, by_prompts, *memory, **hidden)

    monkeypatch.setattr(type(loaded.model), "forward", replayed)
    make = Make(loaded, check)
    answers = SCENARIOS["after_preemption"](make)
    assert max(slices) > 1, "of other sequences, too"
    monkeypatch.undo()
    assert not all(same_bits_as_without_a_cache(make, answers))


def test_one_flipped_bit_in_a_checkpoint_is_seen(load, same_bits_as_without_a_cache, monkeypatch):
    loaded, check = load("qwen3_5", "float32", 2)
    saved = []
    save = StateMemory.save
    monkeypatch.setattr(
        StateMemory, "save", lambda self, row, pages, ids: (saved.append(ids), save(self, row, pages, ids))
    )
    make = Make(loaded, check)
    with make(AMPLE) as rig:
        prompt = words(690, "flipped")
        rig.ask(prompt, 4)
        page = rig.engine.runner.arena.pages[saved[-1][0]]
        largest = int(page.view(torch.float32).abs().argmax())
        page.view(torch.int32)[largest] ^= 1 << 22  # the first bit of the fraction
        again = rig.ask(prompt, 4)
    assert again.account.cached_tokens == 690
    assert not all(same_bits_as_without_a_cache(make, [again]))


def resent_with_exchanged(make: Make, exchange: Callable[[Rig, StoredTail, StoredTail], None]) -> list[Answer]:
    """Two prompts that are sent again after their tails were changed in the arena's pages."""
    with make(AMPLE) as rig:
        prompts = [words(128, "base") + words(40, own) for own in ("one", "other")]
        for prompt in prompts:
            rig.ask(prompt, 1, keep_output=False)
        with rig.engine.changed:
            exchange(rig, *rig.engine.scheduler.cache.tails)
        again = [rig.ask(prompt, 4) for prompt in prompts]
    assert [a.account.cached_tokens for a in again] == [168, 168]
    return again


def rows(_: Rig, one: StoredTail, other: StoredTail) -> None:
    one.rows, other.rows = other.rows, one.rows


def page_of_kv(_: Rig, one: StoredTail, other: StoredTail) -> None:
    one.kv, other.kv = other.kv, one.kv


def hidden_row(rig: Rig, one: StoredTail, other: StoredTail) -> None:
    """Exchange only the final rows, which come first in tails."""
    pages, n_bytes = rig.engine.runner.arena.pages, rig.engine.spec.tail.bytes(0)
    first, second = (pages[tail.rows[0], :n_bytes] for tail in (one, other))
    first[:], second[:] = second.clone(), first.clone()


@pytest.mark.parametrize("exchange", [rows, page_of_kv, hidden_row])
def test_part_of_another_prompts_tail_is_seen(load, same_bits_as_without_a_cache, exchange):
    make = Make(*load("qwen3_5", "float32", 2))
    assert not any(same_bits_as_without_a_cache(make, resent_with_exchanged(make, exchange)))
    assert all(same_bits_as_without_a_cache(make, resent_with_exchanged(make, lambda *_: None)))


def test_tail_evicted_before_its_leg_ran_is_seen(load, same_bits_as_without_a_cache, monkeypatch):
    """Its pages are another prompt's when the leg reads them."""
    make, pin, lost = Make(*load("qwen3_5", "float32", 2)), Tails.pin, []

    def lose(tails: Tails, mid_page: MidPage | None, opened: OpenPlan, *more) -> None:
        pin(tails, mid_page, opened, *more)
        if mid_page is not None and mid_page.tail is not None:
            tails.unpin(opened)
            tails.evict(mid_page.tail)
            opened.mid_page = None
            for page in (*mid_page.tail.kv, *mid_page.tail.rows):
                rig.engine.runner.arena.pages[page] = 0
            lost.append(mid_page.tokens)

    with make(AMPLE) as rig:
        prompt = words(168, "lost")
        rig.ask(prompt, 1, keep_output=False)
        monkeypatch.setattr(Tails, "pin", lose)
        after = rig.ask(prompt + words(5, "turn"), 4, keep_output=False)
    assert (after.account.cached_tokens, lost) == (168, [40])
    assert not all(same_bits_as_without_a_cache(make, [after]))


def test_without_guarded_products_bits_change(checkpoint):
    """In a process of its own: MKL reads its mode once."""
    forms = ("auto", "int8", "int4")
    done = subprocess.run(
        [sys.executable, "-m", "tests.exactness.unguarded", checkpoint("qwen3_5").parent, *forms],
        cwd=ROOT,
        env={**os.environ, "MKL_CBWR": "AUTO"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-len(forms) :] == ["different"] * len(forms), done.stdout
