"""Drafts change no bit: family x format of weights x situation, against the same requests without drafts.

Every situation of the matrix of hits is repeated with drafts of which the first wrong one is in each place in turn, or
none is wrong, or there are none. Compared are the logits of all tokens, and the cached content afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, product

import pytest
import torch

from headwater.draft.drafter import NO_DRAFT, Draft
from headwater.engine.sampler import Sampling
from headwater.errors import DeadlineExceeded
from headwater.models.load import load_model
from headwater.request import Constraint, Generation, SamplingParams
from headwater.schedule.speculation import Speculation, Speculator
from headwater.schedule.step import Step
from tests.covering import cells
from tests.exactness import scenarios
from tests.exactness.formats import FORMATS
from tests.exactness.rig import Answer, Make, Rig, verify_every_draft, words
from tests.exactness.scenarios import AMPLE, SCENARIOS
from tests.exactness.test_matrix import BLOCKS, DTYPES, FAMILIES

ROWS = 3  # drafts of a step
LONG = 100  # tokens of answers, from which on each outcome of a draft has come up
ONE_BY_ONE = ("resend", "chat_turn", "shared_system_prompt", "branch_in_mid_page")  # with memory for all
OF_FORMATS = ("chat_turn", "after_preemption", "with_seven_other_requests_running")
BRIEF = {
    ("qwen3_5", "auto", "float32", "after_preemption"),
    ("qwen3_5", "auto", "bfloat16", "with_seven_other_requests_running"),
    ("kimi_linear", "auto", "float32", "after_eviction_and_refill"),
    (BLOCKS, "int4", "float32", "chat_turn"),
}
Content = dict[tuple[str, bytes, str], torch.Tensor]  # by namespace, key up to its end, and kind


class EachRow:
    """Drafter that knows what earlier servers said."""

    def __init__(self, texts: Sequence[list[int]], turns: Iterator[int]) -> None:
        self.texts, self.turns, self.tokens = texts, turns, list[int]()

    def take(self, tokens: Iterable[int]) -> None:
        self.tokens += tokens

    def propose(self, most: int) -> Draft:
        """Return a draft whose wrong token is at this turn's place; in some turns none is wrong, or no draft."""
        n, wrong = len(self.tokens), next(self.turns) % (ROWS + 2)
        known = next((text[n:] for text in self.texts if len(text) > n and text[:n] == self.tokens), [])
        if wrong > ROWS or not known:
            return NO_DRAFT
        return Draft([token ^ 1 if i == wrong else token for i, token in enumerate(known[: min(most, ROWS)])])


@dataclass(frozen=True)
class Drafting(Make):
    """Makes rigs that draft the answers that others had."""

    texts: list[list[int]] = field(default_factory=list)
    judged: Counter[tuple[int, int]] = field(default_factory=Counter)  # drafts of a step, and how many were right
    turns: Iterator[int] = field(default_factory=count)

    @classmethod
    def after(cls, plain: Make, answers: Iterable[Answer], **more) -> Drafting:
        return cls(plain.loaded, plain.check, plain.settings, texts=[answer.everything for answer in answers], **more)

    def __call__(self, pages: int, **settings) -> Rig:
        rig = super().__call__(pages, **settings)
        speculation = Speculation(lambda namespace: [EachRow(self.texts, self.turns)])
        verify_every_draft(speculation)
        learn = speculation.learn

        def noted(speculator: Speculator | None, drafted: int, right: int) -> None:
            self.judged[drafted, right] += 1
            learn(speculator, drafted, right)

        speculation.learn = noted
        rig.engine.scheduler.speculation = speculation
        return rig

    @property
    def all_came_up(self) -> bool:
        """Whether drafts were rejected at each row, and all of them accepted."""
        return all(self.judged[ROWS, right] for right in range(ROWS + 1))


def content(rig: Rig) -> Content:
    """Return the KV of each cached page, and each checkpoint."""
    spec, arena, cache = rig.engine.spec, rig.engine.runner.arena, rig.engine.scheduler.cache
    unit, found, index = cache.layout.unit_bytes, Content(), cache.index
    for node in index:
        namespace, key = index.namespace(node), index.key_of(node)
        first = len(key) // unit - len(node.pages) + 1
        for at, page in enumerate(node.pages, first):
            parts = [part[page] for layer in spec.attention_layers for part in arena.pages_of(layer)]
            found[namespace, key[: at * unit], "kv"] = torch.cat(parts).clone()
        if node.checkpoint is not None:
            state = arena.pages[list(node.checkpoint)].flatten()[: spec.checkpoint_bytes]
            found[namespace, key, "checkpoint"] = state.clone()
    return found


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch) -> list[Content]:
    """Contents of each server's cache at its end."""
    found, leave = list[Content](), Rig.__exit__

    def noting(rig: Rig, *raised: object) -> None:
        leave(rig, *raised)
        found.append(content(rig))

    monkeypatch.setattr(Rig, "__exit__", noting)
    return found


def same(one: Content, other: Content) -> bool:
    """Return whether all bytes are equal that both have, of which there are some."""
    both = one.keys() & other.keys()
    return bool(both) and all(torch.equal(one[key].view(torch.uint8), other[key].view(torch.uint8)) for key in both)


CELLS = [*product(FAMILIES, ("auto",), DTYPES, SCENARIOS), *product((BLOCKS,), FORMATS, DTYPES, OF_FORMATS)]


@pytest.mark.parametrize(("recipe", "form", "dtype", "scenario"), cells(CELLS, lambda *cell: cell in BRIEF))
def test_drafts_change_no_bit_of_answers_and_cache(load, contents, monkeypatch, recipe, form, dtype, scenario):
    monkeypatch.setattr(scenarios, "COMPANY_TOKENS", 64)  # with drafts, shorter answers end before the last one begins
    loaded, check = load(recipe, dtype, 2, form)
    assert check.deterministic, check.broken_by
    plain = Make(loaded, check)
    expected = SCENARIOS[scenario](plain)
    without = contents[-1]
    drafting = Drafting.after(plain, expected)
    found = SCENARIOS[scenario](drafting)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    assert all(one.same_bits(other) for one, other in zip(found, expected, strict=True))
    with_drafts = contents[-1]
    assert same(without, with_drafts)
    assert any(right for _, right in drafting.judged)
    assert drafting.all_came_up or sum(len(answer.tokens) for answer in found) < LONG
    if scenario in ONE_BY_ONE:
        assert without.keys() == with_drafts.keys()
        assert [answer.account for answer in found] == [answer.account for answer in expected]


def test_states_after_decoded_tokens_in_the_cache_are_seen(load, contents):
    """The control: decode-reuse raw publishes them."""
    loaded, check = load("qwen3_5", "float32", 2)
    for settings in ({}, {"decode_reuse": "raw"}):
        SCENARIOS["chat_turn"](Make(loaded, check, settings))
    assert not same(*contents)


@pytest.mark.parametrize("page_size", [64, 192, pytest.param(128, marks=pytest.mark.full)])
def test_page_sizes_and_prompts_of_whole_pages_change_no_bit(load, contents, page_size):
    loaded, check = load("qwen3_5", "float32", 2)
    model = load_model(loaded.path, "float32", page_size=page_size)
    step = 384  # whole pages of each size

    def asked(make: Make) -> list[Answer]:
        with make(500) as rig:
            first = [rig.ask(words(n, n), 70) for n in (step - 1, step, step + 1, 2 * step)]
            rig.settle()
            turns = [one.everything for one in first[:2]]
            return [*first, *(rig.ask(turn + words(2 * step - len(turn), "turn"), 40) for turn in turns)]

    plain = Make(model, check, {"page_size": page_size, "max_tokens_per_step": step})
    expected = asked(plain)
    drafting = Drafting.after(plain, expected)
    found = asked(drafting)
    assert all(one.same_bits(other) for one, other in zip(found, expected, strict=True))
    assert [answer.account for answer in found] == [answer.account for answer in expected]
    assert all(answer.account.cached_tokens for answer in found[4:])
    without, with_drafts = contents
    assert same(without, with_drafts)
    assert without.keys() == with_drafts.keys()
    assert drafting.all_came_up


def at_each_step(rig: Rig, look: Callable[[], object], planned: list[Step]) -> None:
    """Call `look` before each step is planned, on the engine's thread; list the steps."""
    plan = rig.engine.scheduler.plan_step

    def noting() -> Step:
        look()
        planned.append(plan())
        return planned[-1]

    rig.engine.scheduler.plan_step = noting


def test_checkpoint_at_a_branch_point_is_exact_while_a_neighbour_drafts(load, contents):
    loaded, check = load("qwen3_5", "float32", 2)
    trunk = words(700, "trunk")

    def asked(make: Make) -> tuple[list[Answer], list[Step]]:
        steps, branches = list[Step](), list[Answer]()
        with make(AMPLE) as rig:
            rig.ask(trunk, 4)
            rig.settle()
            neighbour = rig.submit(words(100, "neighbour"), 150)

            def branch() -> None:
                if len(neighbour.tokens) > 20 and not branches:
                    branches.append(rig.submit(trunk[:460] + words(200, "branch"), 10))

            at_each_step(rig, branch, steps)
            rig.wait(neighbour)
            rig.wait(branches[0])
            return [neighbour, *branches, rig.ask(trunk[:460] + words(50, "again"), 10)], steps

    plain = Make(loaded, check)
    expected, _ = asked(plain)
    drafting = Drafting.after(plain, expected, turns=(n for n in count() if n % (ROWS + 2) <= ROWS))
    found, steps = asked(drafting)
    assert any(step.legs and step.legs[0].plan.saves and any(one.drafts for one in step.decodes) for step in steps)
    assert found[2].account.cached_tokens == expected[2].account.cached_tokens == 460
    assert all(one.same_bits(other) for one, other in zip(found, expected, strict=True))
    without, with_drafts = contents
    assert same(without, with_drafts)
    assert drafting.all_came_up


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_request_that_ends_amid_drafts_changes_no_bit_of_others(load, how):
    """It ends with accepted drafts that are not replayed yet; its prompt is asked again, in a slot that was left."""
    loaded, check = load("qwen3_5", "float32", 2)
    prompts, ended = [words(200 + 40 * i, i) for i in range(3)], list[int]()
    plain = Make(loaded, check, {"max_running": 3})
    with plain(AMPLE) as rig:
        expected = [rig.ask(prompt, 60) for prompt in prompts]
    with Drafting.after(plain, expected)(AMPLE) as rig:

        def end() -> None:
            for seq in list(rig.engine.scheduler.running.values()):
                if not ended and getattr(seq, "accepted", 0) and list(seq.tokens[: seq.n_prompt]) == prompts[0]:
                    ended.append(seq.id)
                    if how == "late":
                        rig.engine.loop.deadlines.add(0.0, seq.id)
                    else:
                        rig.engine.cancel(seq.id)

        at_each_step(rig, end, [])
        open_ = [rig.submit(prompt, 60) for prompt in prompts]
        answers = [rig.wait(answer) for answer in open_[1:]]
        rig.settle()
        stats = rig.engine.scheduler.cache.stats()
        assert (stats.leases, stats.pages_private, stats.pages_slot) == (0, 0, 0)
        answers.append(rig.ask(prompts[0], 60))
    assert len(ended) == 1
    assert 0 < len(open_[0].tokens) < 60
    assert open_[0].tokens == expected[0].tokens[: len(open_[0].tokens)]
    assert isinstance(open_[0].error, DeadlineExceeded) == (how == "late")
    assert all(one.same_bits(other) for one, other in zip(answers, [*expected[1:], expected[0]], strict=True))


def test_masks_and_penalties_are_computed_for_rows_that_are_reached(load, monkeypatch):
    loaded, check = load("qwen3_5", "float32", 2)
    params = SamplingParams(
        max_tokens=40, temperature=0.9, seed=3, repetition_penalty=1.2, constraint=Constraint("regex", "[a-z ]{30,60}")
    )
    plain, prompt, adjusted = Make(loaded, check), words(90, "masks"), Sampling.adjusted
    rows = list[int]()

    def asked(make: Make) -> Answer:
        with make(AMPLE) as rig:
            answer = Answer(prompt, 40)
            rig.engine.submit(Generation(tuple(prompt), params), rig._listener(answer))
            return rig.wait(answer)

    monkeypatch.setattr(Sampling, "adjusted", lambda self, logits_V: rows.append(1) or adjusted(self, logits_V))
    expected, n_plain = asked(plain), len(rows)
    drafting = Drafting.after(plain, [expected])
    found = asked(drafting)
    assert found.tokens == expected.tokens
    assert n_plain == len(rows) - n_plain
    assert n_plain in (len(expected.tokens), len(expected.tokens) + 1)  # the end has no event
    assert sum(drafted - right for drafted, right in drafting.judged.elements()) > 5
