"""Composed prompts held to whole ones, on random checkpoints."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headwater.cache.segments.compose import Widths
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.lab.fidelity.forward import Recipe, Workbench, without_attention
from headwater.lab.fidelity.measures import AttentionWatch, compared, measured
from headwater.lab.fidelity.prompts import Prompt
from headwater.models.load import load_model
from headwater.request import Fidelity, Span
from tests.checkpoints import SMALLEST
from tests.checkpoints.tokenizer import VOCAB
from tests.exactness.rig import Make

Checkpoint = Callable[[str], Path]
WINDOWS = ("qwen3_window", "qwen3_windows_only", "qwen3_moe_window")
KINDS = (
    "qwen3_5",
    "qwen3_window",
    "mamba2",
    "minimax",
    "ring",
    "jamba",
    "kimi_linear",
)  # of layers; other families have the same ones


def prompt(lead: int, *segments: int, last: int = 20, seed: int = 0) -> Prompt:
    """Random tokens: a leading part, segments of these lengths, and a last part."""
    spans, at = [], lead
    for length in segments:
        spans.append(Span(at, at + length))
        at += length
    return Prompt(tuple(random.Random(seed).choices(range(VOCAB), k=at + last)), tuple(spans))


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.full] * (one not in KINDS)) for one in (*SMALLEST.values(), *WINDOWS)]
)
def test_first_layer_equals_the_whole_prompts_except_with_naive_addition(name: str, checkpoint: Checkpoint) -> None:
    """HYPIC, section 4.2: its input depends only on tokens, so composing is exact there."""
    model = load_model(checkpoint(name), "float32").model
    found = compared(model, [prompt(30, 110, 90, 100, last=1)], list(Fidelity), 400)
    first = set(range(len(model.spec.blocks[0].parts)))
    for way, (one,) in found.items():
        errors = [one.states[layer].error for layer in first & one.states.keys()]
        if way == "naive":
            assert all(error > 1e-3 for error in errors)
        else:
            errors += [distance.error for layer in first & one.kept.keys() for distance in one.kept[layer].values()]
            assert errors
            assert max(errors) <= 1e-5


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_window"])
def test_a_prompt_none_of_whose_segments_is_reused_is_the_whole_one(name: str, checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint(name), "float32").model
    one, bench = prompt(70, 100, 120), Workbench(model, 400)
    whole = bench.whole(one)
    recipe = Recipe(Widths(8, 8), whole=frozenset({0, 1}))
    composed = bench.composed(one, recipe)
    assert composed.anew == len(one.tokens)
    assert torch.equal(composed.logits_V, whole.logits_V)
    assert all(torch.equal(composed.states[layer], whole.states[layer]) for layer in whole.states)
    found = measured(model.spec, one, recipe, composed, whole)
    assert (found.divergence, found.same_first) == (0.0, True)
    distances = [*found.states.values(), *(one for kept in found.kept.values() for one in kept.values())]
    assert all(distance.error == distance.degrees == 0.0 for distance in distances)


@pytest.mark.parametrize(("last", "differs"), [(10, True), (40, True), (200, False)])
def test_all_tokens_in_a_window_after_the_prompt_are_compared(last: int, differs: bool, checkpoint: Checkpoint) -> None:
    """The second layer's keys and values are those of one pass once the reused tokens have left the window."""
    model = load_model(checkpoint("qwen3_windows_only"), "float32").model
    one, bench = prompt(70, 100, last=last), Workbench(model, 400)
    recipe = Recipe(Widths(8, 8))
    composed, whole = bench.composed(one, recipe), bench.whole(one)
    n_tokens = min(192, len(one.tokens))
    assert [len(kept_TW) for kept in composed.windows.values() for kept_TW in kept] == [n_tokens] * 4
    found = measured(model.spec, one, recipe, composed, whole)
    deepest = max(model.mixers.windows)
    assert list(found.kept) == sorted(model.mixers.windows)
    assert all((found.kept[deepest][name].error > 1e-5) == differs for name in ("keys", "values"))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3", "qwen3_window"])
def test_workbench_composes_like_the_engine(name: str, checkpoint: Checkpoint) -> None:
    loaded = load_model(checkpoint(name), "float32")
    one, taps = prompt(70, 100, 120), loaded.spec.conv_taps
    bench = Workbench(loaded.model, len(one.tokens))
    for fidelity in Fidelity:
        with Make(loaded, SelfCheck(True, None, "compiled"))(400) as rig:
            answer = rig.ask(list(one.tokens), 1, segments=one.segments, fidelity=fidelity)
        composed = bench.composed(one, Recipe.of(fidelity, taps, one))
        assert answer.account.composed_tokens == len(one.tokens) - composed.anew
        assert (answer.logits[0] - composed.logits_V).abs().max() < 1e-4


def test_a_model_without_attention_keeps_nothing_and_is_the_same_otherwise(checkpoint: Checkpoint) -> None:
    model, one = load_model(checkpoint("qwen3_5"), "float32").model, prompt(40, 100)
    skipping = without_attention(model)
    found, skipped = (Workbench(m, 200).whole(one) for m in (model, skipping))
    assert model.mixers.attention
    assert not skipped.kept
    before = [layer for layer in found.states if layer < min(found.kept)]
    after = [layer for layer in found.states if layer > min(found.kept)]
    assert all(torch.equal(found.states[layer], skipped.states[layer]) for layer in before)
    assert not any(torch.equal(found.states[layer], skipped.states[layer]) for layer in after)


def test_without_attention_windows_are_skipped_too(checkpoint: Checkpoint) -> None:
    """Then no layer looks back: only the last token decides the next one."""
    model, one = load_model(checkpoint("qwen3_window"), "float32").model, prompt(40, 100)
    other = Prompt((*prompt(40, 100, seed=1).tokens[:-1], one.tokens[-1]), ())
    for computing, same in ((model, False), (without_attention(model), True)):
        bench = Workbench(computing, 200)
        found = [bench.whole(each) for each in (one, other)]
        assert torch.equal(found[0].logits_V, found[1].logits_V) == same
        assert (not found[0].kept and not found[0].windows) == same


def test_watched_attention_equals_the_layers_attention(checkpoint: Checkpoint) -> None:
    """Attention of a query sums to 1, and a key gets none from queries before it."""
    model = load_model(checkpoint("qwen3_5"), "float32").model
    watch = AttentionWatch(model, 200)
    for seen_HTT in watch.attention(prompt(150).tokens).values():
        assert torch.allclose(seen_HTT.sum(dim=-1), torch.ones(seen_HTT.shape[:2]))
        assert not seen_HTT.triu(1).any()


def test_watched_attention_leaves_a_sink_its_part(checkpoint: Checkpoint) -> None:
    watch = AttentionWatch(load_model(checkpoint("gpt_oss"), "float32").model, 200)
    (seen_HTT,) = watch.attention(prompt(150).tokens).values()
    first_H = seen_HTT[:, 0, 0]
    assert ((first_H > 0) & (first_H < 1)).all()
    assert (seen_HTT.sum(-1) < 1).all()


def test_attention_of_the_last_token_to_segments_is_watched(checkpoint: Checkpoint) -> None:
    watch = AttentionWatch(load_model(checkpoint("qwen3_5"), "float32").model, 300)
    one = prompt(50, 100, 80)
    given = watch.of_last(one, Recipe(Widths(8, 8), whole=frozenset({0, 1})))
    seen = watch.attention(one.tokens)
    last_T = seen[max(seen)][:, -1].mean(dim=0)
    assert given == pytest.approx([float(last_T[50:150].sum()), float(last_T[150:230].sum())])
    assert sum(watch.of_last(one, Recipe(Widths(8, 8)))) < 1


def test_a_segment_that_nothing_precedes_deviates_nowhere(checkpoint: Checkpoint) -> None:
    watch = AttentionWatch(load_model(checkpoint("qwen3_5"), "float32").model, 300)
    for one in watch.deviations(prompt(0, 100), 8).values():
        assert max(one.head, one.interior, one.tail) < 1e-6
    for one in watch.deviations(prompt(50, 100, 80), 8).values():
        assert min(one.head, one.interior, one.tail) > 1e-6
    assert watch.deviations(prompt(50, 16), 8) == {}
