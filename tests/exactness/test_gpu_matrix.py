"""A hit changes no bit on a GPU's path either: kernels in Triton's interpreter, decode steps replayed.

Prompts are short: the interpreter takes a thousand times as long as a card.
"""

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="no Triton here: it comes with the test extra")

from headwater.account import TierOutcome
from headwater.mixers.gpu.recurrent import RecurrentOnGpu
from headwater.models.decode_graphs import DecodeGraphs
from headwater.models.load import LoadedModel, load_model
from headwater.tiers.memory import MemoryStore
from tests.covering import cells
from tests.exactness.rig import Answer, Make, Rig, words
from tests.exactness.test_tiers import server
from tests.replay import Replay
from tests.staging import stage
from tests.support import FULL

PAGES = 20
pytestmark = pytest.mark.usefixtures("wide_blocks")


@pytest.fixture(scope="module")
def kept() -> dict[str, LoadedModel]:
    """Models whose weights were laid out for kernels."""
    return {}


@pytest.fixture
def make(load, gpu_path, kept, recipe) -> Make:
    loaded, check = load(recipe, "float32", 2)
    gpu_path(True)
    return Make(kept.setdefault(recipe, load_model(loaded.path, "float32")), check)


def replayed(rig: Rig) -> Replay:
    """Record the rig's decode steps and replay them from now on."""
    runner = rig.engine.runner
    recorder = Replay(runner.arena.pages, runner.states.bytes_RB)
    runner.graphs = DecodeGraphs(runner.model, runner.arena, runner.states, recorder)
    return recorder


def turns_in_company(rig: Rig) -> list[Answer]:
    """Two turns of a chat; others run with the second one, which hits."""
    prompt, tokens = (120, 10) if FULL else (60, 6)
    first = rig.ask(words(prompt, "chat"), tokens)
    rig.settle()
    others = [rig.submit(words(30 + 40 * i, "other", i), 4) for i in range(2)]
    second = rig.submit(first.everything + words(20, "turn"), 4)
    answers = [first, *(rig.wait(answer) for answer in (*others, second))]
    is_exact = rig.engine.scheduler.decode_reuse == "canonical"  # other engines do not prefill answers
    assert second.account.cached_tokens == (prompt + tokens if is_exact else (prompt + tokens) // 64 * 64)
    assert second.most_running > 1
    return answers


RECIPES = ("qwen3_5", "mamba2", "kimi_linear", "qwen3_window", "lfm2")


@pytest.mark.parametrize("recipe", cells(RECIPES, lambda recipe: recipe == "qwen3_5"))
def test_a_hit_changes_no_bit_on_a_gpu(make, same_bits_as_without_a_cache, monkeypatch, recipe):
    prefill, ran = RecurrentOnGpu.prefill, []
    monkeypatch.setattr(RecurrentOnGpu, "prefill", lambda *given: (ran.append(1), prefill(*given))[1])
    with make(PAGES + 6 * make.checkpoint_pages) as rig:
        recorder = replayed(rig)
        answers = turns_in_company(rig)
    assert ran or recipe == "qwen3_window", "of the kernels"
    assert recorder.count > 1
    assert all(same_bits_as_without_a_cache(make, answers))


@pytest.mark.parametrize("recipe", ["kimi_linear"])
def test_decode_reuse_raw_changes_bits_on_a_gpu(make, same_bits_as_without_a_cache):
    make = replace(make, settings={"decode_reuse": "raw"})
    with make(PAGES + 6 * make.checkpoint_pages) as rig:
        answers = turns_in_company(rig)
    assert not all(same_bits_as_without_a_cache(make, answers))


@pytest.mark.parametrize("recipe", ["qwen3_5"])
def test_a_load_into_staged_pages_changes_no_bit_on_a_gpu(make, same_bits_as_without_a_cache, monkeypatch, recipe):
    """From the host's memory, after the prefix was lost with its engine."""
    staged, store = stage(monkeypatch), MemoryStore(10**9)
    with server(make, [store], pages=PAGES) as rig:
        replayed(rig)
        first = rig.ask(words(130, "gpu"), 4)
    with server(make, [store], pages=PAGES) as rig:
        recorder = replayed(rig)
        again = rig.ask(first.prompt, 4)
        assert recorder.count
    assert again.account.tier_outcome == TierOutcome.LOADED
    assert (again.account.loaded_tokens, again.account.loaded_from) == (130, "memory")
    assert staged["copied"] > 0
    assert all(same_bits_as_without_a_cache(make, [first, again]))
