"""Requests made of segments on real models: what is reused, how close answers are, and that exact ones stay exact."""

from dataclasses import replace

import pytest
import torch

from headwater.cache.segments.compose import METHODS
from headwater.errors import ConfigError
from headwater.request import Fidelity, Span
from headwater.schedule.sequence import Purpose
from headwater.spec import ModelSpec
from tests.covering import cells
from tests.exactness.rig import DOCUMENTS, FAST, LEAD, Answer, Make, Rig, prompt_of, words
from tests.exactness.test_matrix import FAMILIES

PAGES = 1500


@pytest.fixture
def models(load):
    return lambda name: Make(*load(name, "float32", 2), {"healing": "off"})


@pytest.fixture(params=["qwen3_5", "qwen3_window", "lfm2"])
def make(models, request: pytest.FixtureRequest) -> Make:
    """Maker of rigs over a model with recurrent layers, one with a window, and one with its states in pages."""
    return models(request.param)


def ask(rig: Rig, documents: list[list[int]], **more) -> Answer:
    prompt, spans = prompt_of(documents)
    return rig.ask(prompt, segments=spans, **{**FAST, **more})


def exact_lead(make: Make) -> int:
    """Return the tokens of the lead after which a request resumes: if states are in pages, a tail needs none."""
    return len(LEAD) if make.layout.states_in_pages else 128


def distance(answer: Answer, exact: Answer) -> float:
    """Return the distance between the first token's logits and the exact ones, relative to the spread of those."""
    return float((answer.logits[0] - exact.logits[0]).norm() / exact.logits[0].std() / answer.logits[0].numel() ** 0.5)


def test_segments_are_made_once_and_reused_in_any_order(make: Make) -> None:
    with make(PAGES) as rig:
        first = ask(rig, DOCUMENTS)
        made = rig.engine.scheduler.computed[Purpose.SEGMENT]
        assert made == sum(len(d) - 8 for d in DOCUMENTS)
        second = ask(rig, DOCUMENTS[::-1])
        third = ask(rig, DOCUMENTS[1:])
        assert rig.engine.scheduler.computed[Purpose.SEGMENT] == made
        interiors = sum(len(d) - 16 for d in DOCUMENTS)
        assert (first.account.segments, first.account.composed_tokens) == (3, interiors)
        assert (first.account.cold_tokens, first.account.cached_tokens) == (interiors, 0)
        assert (second.account.segments, second.account.cached_tokens) == (3, exact_lead(make) + interiors)
        assert second.account.cold_tokens == third.account.cold_tokens == 0
        assert third.account.segments == 2
        seams = [(len(documents) * 16) for documents in (DOCUMENTS, DOCUMENTS[::-1], DOCUMENTS[1:])]
        assert [one.account.recomputed_tokens for one in (first, second, third)] == seams


def test_a_model_of_one_recurrent_layer_is_composed_exactly(models) -> None:
    """Nothing depends on what the segments were computed without."""
    make = models("mamba2_one_layer")
    with make(PAGES) as rig:
        exact = rig.ask(prompt_of(DOCUMENTS)[0])
    with make(PAGES) as rig:
        ask(rig, DOCUMENTS[::-1])
        composed = ask(rig, DOCUMENTS)
        assert composed.account.segments == 3
        again = ask(rig, DOCUMENTS)
        assert again.account.approximate_tokens > 600, "what was composed is a prefix to the next one"
        assert again.tokens == composed.tokens
        assert (torch.stack(composed.logits) - torch.stack(exact.logits)).abs().max() < 1e-4
        assert composed.tokens == exact.tokens


def test_baselines_compose_one_recurrent_layer_exactly_except_naive_addition(models) -> None:
    """Seams are for what attends, and for the layers above; a transition is for every layer."""
    make = models("mamba2_one_layer")
    taps = make.loaded.spec.conv_taps
    computed = {Fidelity.NAIVE: 0, Fidelity.W0: taps - 1, Fidelity.W4: 4 + max(4, taps - 1)}  # of each segment
    with make(PAGES) as rig:
        exact = rig.ask(prompt_of(DOCUMENTS)[0])
    for fidelity, anew in computed.items():
        with make(PAGES) as rig:
            answer = ask(rig, DOCUMENTS, fidelity=fidelity)
            assert answer.account.composed_tokens == sum(len(d) for d in DOCUMENTS) - anew * len(DOCUMENTS)
            off = (torch.stack(answer.logits) - torch.stack(exact.logits)).abs().max()
            assert (off < 1e-4) == (fidelity is not Fidelity.NAIVE)


def test_prefix_composed_at_one_fidelity_is_not_reused_at_another(make: Make) -> None:
    prompt, spans = prompt_of(DOCUMENTS, question=words(100, "question"))
    with make(PAGES) as rig:
        for fidelity in (one for one in Fidelity if METHODS[one].whole_of(3) == 0):
            account = rig.ask(prompt, segments=spans, fidelity=fidelity).account
            assert (account.segments, account.approximate_tokens) == (3, 0)
        again = rig.ask(prompt, segments=spans, fidelity=fidelity)
        assert again.account.approximate_tokens > 600


def test_the_segment_that_is_asked_about_is_computed_whole(make: Make) -> None:
    """And what was computed for one question is no prefix to another, which is about another segment."""
    with make(PAGES) as rig:
        for document in DOCUMENTS[1:]:
            question = [7] * 64 + document[40:60] + [7] * 64
            prompt, spans = prompt_of(DOCUMENTS, question=question)
            one, two = (rig.ask(prompt, segments=spans, fidelity=Fidelity.BALANCED).account for _ in range(2))
            others = len(DOCUMENTS) - 1
            assert (one.segments, one.approximate_tokens) == (others, 0)
            assert one.recomputed_tokens == len(document) + others * 16
            assert (two.segments, two.recomputed_tokens) == (0, 0)
            assert two.approximate_tokens > 400
        assert rig.engine.scheduler.computed[Purpose.SEGMENT] == sum(len(d) - 8 for d in DOCUMENTS)
        fast = ask(rig, DOCUMENTS)
        assert (fast.account.segments, fast.account.approximate_tokens) == (3, 0)
        assert rig.engine.scheduler.computed[Purpose.SEGMENT] == sum(len(d) - 8 for d in DOCUMENTS), (
            "all have the same seams"
        )


FULL = [pytest.param(name, marks=pytest.mark.full) for name in ("mamba2", "granite", "minimax", "falcon_h1")]


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "ring", "jamba", "qwen3_window", *FULL])
def test_answers_are_close_and_wider_seams_bring_them_closer(models, name: str) -> None:
    make = models(name)
    with make(PAGES) as rig:
        exact = rig.ask(prompt_of(DOCUMENTS)[0])
    distances = {}
    for fidelity in (Fidelity.FAST, Fidelity.W32):
        with make(PAGES) as rig:
            answer = ask(rig, DOCUMENTS, fidelity=fidelity)
            assert answer.account.segments == 3
            distances[fidelity] = distance(answer, exact)
    assert 0 < distances[Fidelity.W32] < 1
    assert distances[Fidelity.FAST] < 1.5


def test_a_request_with_segments_that_are_too_short_is_exact(make: Make) -> None:
    short = [words(16, "short", i) for i in range(3)]
    with make(PAGES) as rig:
        exact = rig.ask(prompt_of(short)[0])
    with make(PAGES) as rig:
        answer = ask(rig, short)
        assert (answer.account.segments, answer.account.recomputed_tokens) == (0, 48)
        assert rig.engine.scheduler.computed[Purpose.SEGMENT] == 0
    assert answer.same_bits(exact)


def test_exact_requests_after_composed_ones_match_a_server_without_segments(make: Make) -> None:
    prompt, _ = prompt_of(DOCUMENTS)
    other, _ = prompt_of(DOCUMENTS[::-1])
    with make(PAGES) as rig:
        expected = [rig.ask(p) for p in (prompt, other, prompt)]
    with make(PAGES) as rig:
        for order in (DOCUMENTS, DOCUMENTS[::-1]):
            ask(rig, order)
            ask(rig, order, fidelity=Fidelity.HIGH)
        rig.settle()
        got = [rig.ask(p) for p in (prompt, other, prompt)]
    before = 350 if make.layout.states_in_pages else 256
    assert got[0].account.cached_tokens == before, "what stands before the first interior is exact, and no more"
    for answer, right in zip(got, expected, strict=True):
        assert answer.account.segments == answer.account.approximate_tokens == 0
        assert answer.same_bits(right)


def test_next_turn_resumes_after_composed_tokens(make: Make) -> None:
    with make(PAGES) as rig:
        prompt, spans = prompt_of(DOCUMENTS)
        first = rig.ask(prompt, 70, segments=spans, **FAST)
        rig.settle()
        turn = rig.ask(first.everything + words(30, "more"), segments=spans, **FAST)
        known = len(first.everything) // 64 * 64
        assert (turn.account.cached_tokens, turn.account.segments) == (known, 0)
        assert turn.account.approximate_tokens == known - len(LEAD) - 8
        assert turn.account.recomputed_tokens == 0
        exact = rig.ask(first.everything + words(30, "more"))
        assert exact.account.cached_tokens == exact_lead(make)


def test_the_same_composed_request_has_the_same_bits(make: Make) -> None:
    with make(PAGES) as rig:
        one, two = ask(rig, DOCUMENTS), ask(rig, DOCUMENTS)
        other = rig.ask(prompt_of(DOCUMENTS)[0], segments=prompt_of(DOCUMENTS)[1], **FAST)
    assert two.same_bits(other)
    assert one.tokens == two.tokens


RECURRENT = ("qwen3_5", *(pytest.param(name, marks=pytest.mark.full) for name in FAMILIES if name != "qwen3_5"))


@pytest.mark.parametrize("name", RECURRENT)
def test_segment_after_a_tail_is_composed_to_the_same_bits(models, same_bits_as_without_a_cache, name: str) -> None:
    """The request resumes at the tail's last token, on the page on which its first segment begins."""
    make = models(name)
    with make(PAGES) as rig, make(PAGES, tails=False) as without:
        for one in (rig, without):
            one.ask(LEAD, 1, keep_output=False)
        answers = [ask(one, DOCUMENTS) for one in (rig, without)]
        exact = rig.ask(prompt_of(DOCUMENTS)[0])
    assert [answer.account.resumed_at for answer in answers] == [len(LEAD), 128]
    assert [answer.account.segments for answer in answers] == [3, 3]
    assert answers[0].same_bits(answers[1])
    assert exact.account.cached_tokens >= len(LEAD)
    assert same_bits_as_without_a_cache(make, [exact]) == [True]


def test_tail_beyond_the_first_segments_beginning_is_not_used(make: Make) -> None:
    with make(PAGES) as rig, make(PAGES, tails=False) as without:
        for one in (rig, without):
            one.ask(LEAD + DOCUMENTS[0][:20], 1, keep_output=False)
        answers = [ask(one, DOCUMENTS) for one in (rig, without)]
    assert [answer.account.resumed_at for answer in answers] == [128, 128]
    assert answers[0].same_bits(answers[1])


def test_tail_before_composed_segments_is_kept_and_is_exact(make: Make, same_bits_as_without_a_cache) -> None:
    with make(PAGES) as rig:
        ask(rig, DOCUMENTS)
        ask(rig, DOCUMENTS[::-1])  # resumes at the checkpoint before the first segment, and keeps the tail after it
        third = ask(rig, DOCUMENTS[1:])
        exact = rig.ask(LEAD + words(30, "exact"))
    assert [one.account.resumed_at for one in (third, exact)] == [len(LEAD), len(LEAD)]
    assert same_bits_as_without_a_cache(make, [exact]) == [True]


def test_namespaces_do_not_share_segments(make: Make) -> None:
    with make(PAGES) as rig:
        ask(rig, DOCUMENTS)
        made = rig.engine.scheduler.computed[Purpose.SEGMENT]
        answer = ask(rig, DOCUMENTS, namespace="b")
        assert rig.engine.scheduler.computed[Purpose.SEGMENT] == 2 * made
        assert (answer.account.cached_tokens, answer.account.cold_tokens) == (0, answer.account.composed_tokens)


def test_requests_that_wait_for_the_same_segment_make_it_once(make: Make) -> None:
    with make(PAGES) as rig:
        prompts = [prompt_of(order, question=words(20, i)) for i, order in enumerate((DOCUMENTS, DOCUMENTS[::-1]) * 2)]
        answers = [rig.submit(prompt, 4, segments=spans, **FAST) for prompt, spans in prompts]
        for answer in answers:
            account = rig.wait(answer).account
            assert account.segments == 3 or account.approximate_tokens > 600
        assert rig.engine.scheduler.computed[Purpose.SEGMENT] == sum(len(d) - 8 for d in DOCUMENTS)


def test_answer_without_memory_for_segments_is_exact(make: Make) -> None:
    prompt, spans = prompt_of(DOCUMENTS)
    with make(PAGES) as rig:
        exact = rig.ask(prompt)
    pages = -(-len(prompt) // 64) + 1 + 2 * make.checkpoint_pages
    with make(pages) as rig:
        answer = rig.ask(prompt, segments=spans, **FAST)
    if answer.account.segments == 0:
        assert answer.same_bits(exact)


def test_many_requests_in_little_memory_all_end(make: Make) -> None:
    with make(60) as rig:
        waiting = []
        for i in range(10):
            documents = [words(100 + 10 * ((i + k) % 5), "small", (i + k) % 5) for k in range(3)]
            prompt, spans = prompt_of(documents, question=words(10, i))
            waiting.append(rig.submit(prompt, 6, segments=spans if i % 3 else (), **FAST))
        for answer in waiting:
            rig.wait(answer)
            assert len(answer.tokens) == 6


@pytest.mark.parametrize("kv_pages", [26, pytest.param(34, marks=pytest.mark.full)])
def test_preemption_and_eviction_with_composed_requests_change_no_bit(make: Make, kv_pages: int) -> None:
    """Compare exact requests with a server without a cache, and composed ones that stayed with a server with room."""
    documents = [DOCUMENTS[1], words(120, "another")]
    asked = [prompt_of(documents, words(70, "lead", i), words(10 + i, i)) for i in range(6)]
    spans_of = [spans if i % 3 else () for i, (_, spans) in enumerate(asked)]
    with make(kv_pages + 8 * make.checkpoint_pages + 2 * make.loaded.spec.transition_pages) as rig:
        rig.engine.warm_segments([tuple(document) for document in documents], "")
        answers = [rig.submit(p, 180, segments=s, **FAST) for (p, _), s in zip(asked, spans_of, strict=True)]
        for answer in answers:
            rig.wait(answer)
        assert rig.engine.scheduler.cache.stats().evicted_segments > 0
    assert any(answer.account.preemptions for answer in answers)
    assert any(answer.account.segments for answer in answers)
    with make(PAGES, cache=False) as exact, make(PAGES) as ample:
        for answer, spans in zip(answers, spans_of, strict=True):
            if answer.account.segments == 0:
                assert answer.same_bits(exact.ask(answer.prompt, 180))
            elif not answer.account.preemptions:
                assert answer.same_bits(ample.ask(answer.prompt, 180, segments=spans, **FAST))


def test_warm_segments_are_there_when_they_are_asked_for(make: Make) -> None:
    with make(PAGES) as rig:
        texts = [tuple(document) for document in DOCUMENTS]
        assert rig.engine.warm_segments([*texts, tuple(words(16, "short"))], "") == [*["stored"] * 3, "too_short"]
        made = rig.engine.scheduler.computed[Purpose.SEGMENT]
        prompt, spans = prompt_of(DOCUMENTS)
        answer = rig.ask(prompt, segments=spans, fidelity=Fidelity.BALANCED)
        assert answer.account.segments == 2, "what is asked about is computed"
        assert rig.engine.scheduler.computed[Purpose.SEGMENT] == made
        assert rig.engine.warm_segments(texts[:1], "") == ["held"]


@pytest.mark.parametrize(("eviction", "gone"), [("lru", 0), ("cost", 1)])
def test_segment_eviction_setting_chooses_the_evicted_segment(make: Make, eviction: str, gone: int) -> None:
    """The first of two segments has served hits, the second was used last; there is no room for a third."""
    documents = [words(200, "equal", i) for i in range(3)]

    def fill(rig: Rig) -> int:
        """Store and use two segments, and return the number of pages in use."""
        rig.engine.warm_segments([tuple(documents[0])], "")
        for i in range(3):
            prompt, spans = prompt_of(documents[:1], words(150, "lead", i))
            assert rig.ask(prompt, segments=spans, **FAST).account.segments == 1
        rig.settle()
        rig.engine.warm_segments([tuple(documents[1])], "")
        stats = rig.engine.scheduler.cache.stats()
        return stats.pages_total - stats.pages_free

    share = {"placement": "none", "segment_eviction": eviction, "segment_share": 0.0}
    with make(PAGES, **share) as rig:
        pages = fill(rig)
    with make(pages + make.checkpoint_pages, **share) as rig:  # and a slot, in which the third is built
        assert fill(rig) == pages
        assert rig.engine.warm_segments([tuple(documents[2])], "") == ["stored"]
        for i, outcome in ((1 - gone, "held"), (gone, "stored")):
            assert rig.engine.warm_segments([tuple(documents[i])], "") == [outcome]


def test_segment_of_waiting_request_is_not_evicted_for_its_other_segments(make: Make, monkeypatch) -> None:
    """Two of three segments fit, by the hard budget of split pools; a request has the older of two, and a third."""
    documents = [words(200, "equal", i) for i in range(3)]
    layout, whole = make.layout, ModelSpec.layout
    share = 2.5 * (3 + layout.checkpoint_pages + layout.transition_pages) / PAGES
    monkeypatch.setattr(ModelSpec, "layout", lambda *of: replace(whole(*of), state_fraction=0.5))
    with make(PAGES, segment_eviction="lru", segment_share=share) as rig:
        rig.engine.warm_segments([tuple(document) for document in documents[:2]], "")
        assert ask(rig, [documents[0], documents[2]]).account.segments == 2
        assert rig.engine.scheduler.computed[Purpose.SEGMENT] == 3 * (200 - 8), "each was made once"
        assert rig.engine.scheduler.cache.stats().evicted_segments == 1


def test_a_prompt_that_is_one_segment_stores_it(make: Make) -> None:
    with make(PAGES) as rig:
        document = DOCUMENTS[0]
        answer = rig.ask(document, 1, segments=(Span(0, len(document)),))
        assert answer.account.segments == 0, "the end of a prompt is always computed"
        rig.settle()
        assert rig.engine.warm_segments([tuple(document)], "") == ["held"]


def test_segments_too_large_for_memory_are_reported(make: Make) -> None:
    with make(2 * make.checkpoint_pages + 4) as rig:
        assert rig.engine.warm_segments([tuple(words(2000, "long"))], "") == ["no_memory"]
        assert rig.ask(words(70, "after")).tokens


def test_without_a_cache_nothing_is_stored(make: Make) -> None:
    with make(PAGES, cache=False) as rig:
        with pytest.raises(ConfigError, match="no segments are stored"):
            rig.engine.warm_segments([tuple(DOCUMENTS[0])], "")
        assert ask(rig, DOCUMENTS).account.segments == 0


def stored(make: Make, budget: int) -> torch.Tensor:
    """Return the bytes of a segment that was built in steps of `budget` tokens."""
    with make(200, max_tokens_per_step=budget) as rig:
        assert rig.engine.warm_segments([tuple(words(300, "built"))], "") == ["stored"]
        (one,) = rig.engine.scheduler.cache.segments
        return rig.engine.runner.arena.pages[[*one.kv, *one.state, *one.transition]].clone()


@pytest.mark.parametrize("family", cells(FAMILIES, lambda family: family == "qwen3_5"))
def test_a_segment_has_the_same_bits_with_every_budget(load, family) -> None:
    """With 64, the first leg computes the head alone."""
    make = Make(*load(family, "float32", 2))
    whole = stored(make, 512)
    for budget in (64, 128, 192):
        assert torch.equal(stored(make, budget), whole), budget
