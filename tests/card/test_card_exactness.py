"""On a card: the logits of the CPU, and the same bits whatever is cached, in batches, recorded and drafted."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch

from headwater.engine.proof.fingerprint import fingerprint, probe
from headwater.engine.proof.selfcheck import HEIGHTS
from headwater.mixers import numerics
from headwater.mixers.gpu.sampling import Draw, choose
from headwater.mixers.linear import Linear, answers_product, first_bad_height
from headwater.mixers.numerics import Numerics
from headwater.models.load import load_model
from headwater.tiers.memory import MemoryStore
from tests.card.conftest import DEVICE
from tests.checkpoints import TRAINED
from tests.exactness.rig import Answer, Make, Rig, words
from tests.exactness.scenarios import SCENARIOS
from tests.exactness.test_matrix import FAMILIES
from tests.exactness.test_speculating_servers import drafting
from tests.exactness.test_tier_segments import OFF, ask, built, contents
from tests.exactness.test_tiers import copied, disk, files_of, server
from tests.mixers.gpu.test_gpu_sampling import expected
from tests.support import Bench

RECIPES = (*FAMILIES, "mamba", "qwen3_5_wide", TRAINED)
CLOSE = 2e-3  # of the largest logit, in float32
NAMES = (
    "chat_turn",
    "branch_in_mid_page",
    "after_eviction_and_refill",
    "after_preemption",
    "with_seven_other_requests_running",
)
PROMPT, CUT = 200, 128  # tokens
TIERED = 1300  # tokens: one whole run of KV, and a ragged one
DRAFTED = ("qwen3_5", "qwen3_window", "bamba", "mamba2", "kimi_linear", "ring", "jamba")


def models(recipes: Sequence[str], dtypes: Sequence[str] = ("float32", "bfloat16")) -> Iterator[object]:
    """Yield models; the tests of one run in one process."""
    for recipe, dtype in product(recipes, dtypes):
        yield pytest.param(recipe, dtype, marks=pytest.mark.xdist_group(recipe))


@pytest.mark.xdist_group("sampling")
def test_sampled_tokens_follow_the_rules_singly_and_in_batches():
    rows, size = 24, 50_000 if DEVICE == "cuda" else 300
    x_RV = torch.randn(rows, size, generator=torch.Generator().manual_seed(0)).mul_(4).bfloat16().float()
    draws = [
        Draw(row, temperature, top_k, top_p, 0.01, (row + 0.5) / rows)
        for row, (temperature, top_k, top_p) in enumerate(product((0.0, 0.7, 1.5), (0, 20), (1.0, 0.95, 0.5, 0.05)))
    ]
    largest_R, token_R = choose(x_RV.to(DEVICE), draws)
    assert token_R == [expected(x_V.numpy(), draw) for x_V, draw in zip(x_RV, draws, strict=True)]
    assert largest_R == x_RV.amax(1).tolist()
    assert [choose(x_RV.to(DEVICE), [draw])[1][0] for draw in draws] == token_R


@pytest.mark.parametrize(("recipe", "dtype"), models(RECIPES))
def test_self_check_finds_nothing(load, recipe, dtype):
    assert load(recipe, dtype, 2)[1].broken_by is None


@pytest.mark.parametrize(("recipe", "dtype"), models(RECIPES, ("float32",)))
def test_logits_are_those_of_the_cpu(load, recipe, dtype):
    """A prompt in one slice and in two, and decoding rows singly and in batches."""
    loaded, check = load(recipe, dtype, 2)
    prompt, found = words(PROMPT, "prompt"), {}
    for device in dict.fromkeys(("cpu", DEVICE)):
        numerics.use(Numerics(check.mode))
        model = loaded.model if device == DEVICE else load_model(loaded.path, dtype).model
        bench = Bench(model, poison=True, device=device)
        seq, other = bench.sequence(PROMPT + 9), bench.sequence(PROMPT)
        rows = [bench.prefill(seq, prompt)]
        rows += [bench.step([], [(seq, token)]) for token in (301, 302)]
        again = bench.sequence(PROMPT + 9)
        in_parts = [bench.prefill(again, prompt, (CUT,))]
        bench.step([(other, words(70, "other"))])
        in_parts += [bench.step([], [(other, 400 + token), (again, token)])[1:] for token in (301, 302)]
        found[device] = torch.cat(rows).cpu()
        assert torch.equal(torch.cat(in_parts).cpu(), found[device]), device
    apart = (found[DEVICE] - found["cpu"]).abs().max() / found["cpu"].abs().max()
    assert apart < CLOSE


@pytest.mark.parametrize(("recipe", "dtype"), models(RECIPES))
def test_hit_changes_no_bit_on_a_card(load, same_bits_as_without_a_cache, recipe, dtype):
    make = Make(*load(recipe, dtype, 2), device=DEVICE)
    other = []
    for name in NAMES:
        answers = SCENARIOS[name](make)
        assert any(answer.account.cached_tokens for answer in answers)
        if not all(same_bits_as_without_a_cache(make, answers)):
            other.append(name)
    assert other == []


def asked(rig: Rig) -> list[Answer]:
    """Answers to three prompts at once."""
    answers = [rig.submit(words(150 + 40 * i, "prompt", i), 24) for i in range(3)]
    return [rig.wait(answer) for answer in answers]


@pytest.mark.parametrize(("recipe", "dtype"), models(RECIPES))
def test_steps_are_recorded_as_graphs_that_have_the_bits_of_eager_ones(load, recipe, dtype, caplog):
    make = Make(*load(recipe, dtype, 2), device=DEVICE)
    with caplog.at_level(logging.WARNING), make(600) as rig:
        recorded = asked(rig)
        known = rig.engine.runner.graphs._known
        assert known
        assert None not in known.values(), caplog.text
    with make(600) as rig:
        rig.engine.runner.graphs = None
        eager = asked(rig)
    assert all(one.same_bits(other) for one, other in zip(recorded, eager, strict=True))


@pytest.mark.parametrize(("recipe", "dtype"), models(RECIPES))
def test_tiers_below_a_card_change_no_bit(load, same_bits_as_without_a_cache, tmp_path, recipe, dtype):
    """Prefixes come back from disk and from the host's memory, while steps are recorded during loads."""
    make = Make(*load(recipe, dtype, 2), device=DEVICE)
    own, memory = fingerprint(make.loaded, make.loaded.path, make.check.mode, probe(make.loaded)), MemoryStore(10**9)
    for open_stores in (lambda: disk(tmp_path), lambda: [memory]):
        with server(make, open_stores(), fingerprint=own) as rig:
            first = rig.ask(words(TIERED, "tier"))
        with server(make, open_stores(), fingerprint=own) as rig:
            beside = [rig.submit(words(150 + 40 * i, "beside", i), 24) for i in range(3)]
            answers = [first, rig.ask(first.prompt), *(rig.wait(one) for one in beside)]
            assert rig.engine.scheduler.tiers.tiers[0].counts["corrupt"] == 0
        assert answers[1].account.loaded_tokens == answers[1].account.cached_tokens == TIERED
        assert all(same_bits_as_without_a_cache(make, answers))


@pytest.mark.parametrize(("recipe", "dtype"), models(FAMILIES))
def test_segments_come_back_from_disk_to_a_card_to_the_bit(load, tmp_path, recipe, dtype):
    make = Make(*load(recipe, dtype, 2), OFF, device=DEVICE)
    with server(make, disk(tmp_path)) as rig:
        composed = ask(rig)
        copied(rig)
        stored = contents(rig)
    for file in files_of(tmp_path, "s"):  # the leading part is computed in both
        file.unlink()
    with server(make, disk(tmp_path)) as rig:
        recomposed, loaded = ask(rig), contents(rig)
        assert built(rig) == 0
    assert stored.keys() == loaded.keys()
    assert all(stored[key].equal(loaded[key]) and stored[key].any() for key in stored)
    assert recomposed.same_bits(composed)


@pytest.mark.parametrize(("recipe", "dtype"), models(("qwen3_5",)))
def test_flipped_byte_gets_not_to_the_card(load, same_bits_as_without_a_cache, tmp_path, recipe, dtype):
    make = Make(*load(recipe, dtype, 2), device=DEVICE)
    with server(make, disk(tmp_path)) as rig:
        first = rig.ask(words(TIERED, "tier"))
    for file in files_of(tmp_path, "k"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0x40
        file.write_bytes(content)
    with server(make, disk(tmp_path)) as rig:
        again = rig.ask(first.prompt)
        assert rig.engine.scheduler.tiers.tiers[0].counts["corrupt"] >= 1
    assert again.account.cached_tokens == 0
    assert same_bits_as_without_a_cache(make, [again]) == [True]


@pytest.mark.parametrize(("recipe", "dtype"), models(("qwen3_5", "kimi_linear")))
def test_prefixes_come_back_while_memory_evicts_on_a_card(load, same_bits_as_without_a_cache, recipe, dtype):
    """Loads and copies continue during steps, of prompts that are evicted for each other."""
    make = Make(*load(recipe, dtype, 2), device=DEVICE)
    prompts = [words(TIERED, "evicted", i) for i in range(3)]
    with server(make, [MemoryStore(10**9)], pages=TIERED // 64 + 10) as rig:
        answers = []
        for i, prompt in enumerate(3 * prompts):
            beside = rig.submit(words(200, "beside", i), 16)
            answers += [rig.ask(prompt, 4), rig.wait(beside)]
        assert rig.engine.scheduler.cache.stats().evicted_checkpoints > 0
        assert rig.engine.scheduler.tiers.loaded_tokens > TIERED
    assert all(same_bits_as_without_a_cache(make, answers))


@pytest.mark.parametrize(("recipe", "dtype"), models(DRAFTED))
def test_drafts_change_no_bit_on_a_card(load, recipe, dtype):
    make = Make(*load(recipe, dtype, 2), device=DEVICE)
    with make(600) as rig:
        plain = asked(rig)
    with drafting(make, [answer.everything for answer in plain]) as rig:
        drafted = asked(rig)
        assert rig.engine.stats().accepted_drafts > 0
    assert all(one.same_bits(other) for one, other in zip(plain, drafted, strict=True))


def test_decode_reuse_raw_changes_bits_on_a_card(load, same_bits_as_without_a_cache):
    """Control: the state after decoded tokens instead of the prompt's."""
    make = Make(*load("qwen3_5", "float32", 2), settings={"decode_reuse": "raw"}, device=DEVICE)
    assert not all(same_bits_as_without_a_cache(make, SCENARIOS["chat_turn"](make)))


def test_products_without_a_guard_change_bits_on_a_card():
    """Control: torch's products as they are, whose rows depend on their number."""
    generator = torch.Generator().manual_seed(0)
    weight_NK = torch.randn(1024, 4096, generator=generator).to(DEVICE).bfloat16()
    x_RK = torch.randn(HEIGHTS[-1], 4096, generator=generator).to(DEVICE).bfloat16()
    bad = {
        mode: first_bad_height(answers_product(Linear(weight_NK, numerics=Numerics(mode))), x_RK, HEIGHTS)
        for mode in ("plain", "tiled")
    }
    assert bad["plain"] is not None
    assert bad["tiled"] is None
