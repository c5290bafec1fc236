"""A draft model: its drafts change no answer, its memory is its own, and a request that ends leaves nothing there."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from headwater.config import ServeConfig
from headwater.engine import draft_model
from headwater.engine.draft_model import PREFILLED, DraftModel, check_fits
from headwater.engine.engine import Engine
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.errors import ConfigError
from headwater.models.load import LoadedModel, load_model
from headwater.schedule.speculation import Speculator
from headwater.setting import SettingError
from tests.exactness.rig import PATIENCE, Rig, verify_every_draft, words

PAGES = 4000
CHECK = SelfCheck(True, None, "compiled")


@pytest.fixture(scope="module")
def loaded(checkpoint: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    return lambda name: load_model(checkpoint(name), "float32")


@contextmanager
def drafting(
    monkeypatch: pytest.MonkeyPatch, target: LoadedModel, draft: LoadedModel | None, **settings: object
) -> Iterator[Rig]:
    """An engine whose drafts are all verified."""
    over = Engine.over
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "over", lambda *given: over(*given, draft))
        speculation = "off" if draft is None else "draft"
        path = None if draft is None else draft.path
        rig = Rig(target, CHECK, PAGES, speculation=speculation, draft_model=path, **settings)
        patched.setattr(Speculator, "wants_head", lambda self, least, cheap: self.uses_head)
        verify_every_draft(rig.engine.scheduler.speculation)
        with rig:
            yield rig


def wait_until_empty(model: DraftModel) -> None:
    """A request is forgotten after its last event."""
    until = time.monotonic() + PATIENCE
    while model._shadows and time.monotonic() < until:
        time.sleep(0.01)
    assert not model._shadows


def model_of(rig: Rig) -> DraftModel:
    head = rig.engine.scheduler.speculation.head
    assert isinstance(head, DraftModel)
    return head


@pytest.mark.parametrize("draft", ["qwen3_5", "mamba2", "qwen3_window", "bamba"])
def test_answers_with_any_draft_model_match_those_without_drafts(draft, loaded, monkeypatch) -> None:
    """The same model is always right, others hardly ever."""
    told = []
    prompts = [words(70 + 50 * i, "drafted", i) for i in range(4)]
    for one in (None, loaded(draft)):
        with drafting(monkeypatch, loaded("qwen3_5"), one) as rig:
            answers = [rig.wait(answer) for answer in [rig.submit(prompt, 30) for prompt in prompts]]
            rig.settle()
            told.append([*answers, *(rig.ask([*a.everything, *words(9, i)], 12) for i, a in enumerate(answers))])
            speculation = rig.engine.scheduler.speculation
    for plain, drafted in zip(*told, strict=True):
        assert plain.same_bits(drafted)
        assert (plain.tokens, plain.account) == (drafted.tokens, drafted.account)
    assert speculation.accepted > 50 if draft == "qwen3_5" else speculation.rejected > 50
    assert speculation.rejected == 0 or draft != "qwen3_5"


def test_draft_model_prefills_long_prompts_in_parts_and_known_ones_not_again(loaded, monkeypatch) -> None:
    target = loaded("qwen3_5")
    with drafting(monkeypatch, target, target) as rig:
        model, legs = model_of(rig), []
        prefill = model._prefill
        model._prefill = lambda own, budget: legs.append(prefill(own, budget)) or legs[-1]
        first = rig.ask(words(3 * PREFILLED + 20, "long"), 20)
        assert sum(legs) >= 3 * PREFILLED
        assert max(legs) <= PREFILLED
        assert 4 <= len([leg for leg in legs if leg]) <= 8
        accepted = rig.engine.scheduler.speculation.accepted
        assert 0 < accepted < 19  # the first steps had none
        legs.clear()
        rig.settle()
        rig.ask([*first.everything, *words(5, "more")], 8)
        assert sum(legs) < PREFILLED
        assert model.cache.stats().resumed_tokens >= 3 * PREFILLED - 64


def test_requests_that_end_leave_nothing_behind(loaded, monkeypatch) -> None:
    target = loaded("qwen3_5")
    with drafting(monkeypatch, target, target, max_running=3) as rig:
        model = model_of(rig)
        free = len(model._free)
        answers = [rig.submit(words(90, i), 400) for i in range(5)]
        rig.wait(rig.submit(words(80, "other"), 10))
        for answer in answers:
            rig.engine.cancel(next(id for id, one in rig._answers.items() if one is answer))
        rig.settle()
        wait_until_empty(model)
        assert len(model._free) == free == 3
        stats = model.cache.stats()
        assert (stats.leases, stats.pages_slot, stats.pages_private) == (0, 0, 0)
        model.cache.check()


def test_failing_draft_model_ends_only_drafts(loaded, monkeypatch) -> None:
    target, prompt = loaded("qwen3_5"), words(100, "fails")
    with drafting(monkeypatch, target, None) as rig:
        plain = rig.ask(prompt, 20)

    def fail(self, seqs, most=None):
        raise RuntimeError("no memory bandwidth left")

    with drafting(monkeypatch, target, target) as rig:
        monkeypatch.setattr(DraftModel, "_decode", fail)
        assert rig.ask(prompt, 20).tokens == plain.tokens
        assert rig.engine.scheduler.speculation.head is None
        assert rig.ask(prompt, 5).tokens == plain.tokens[:5]


def test_draft_model_uses_a_tenth_of_the_memory(loaded, monkeypatch) -> None:
    target = loaded("qwen3_5")
    with drafting(monkeypatch, target, target) as rig:
        memory = PAGES * target.spec.page_bytes
        pages = rig.engine.scheduler.layout.n_pages
        assert model_of(rig).cache.layout.n_pages == memory // 10 // target.spec.page_bytes
        assert pages == (memory - rig.engine.draft_bytes) // target.spec.page_bytes
        assert rig.engine.draft_bytes > memory // 10


def test_prompt_too_large_for_the_draft_memory_gets_no_draft(loaded, monkeypatch) -> None:
    target, prompt = loaded("qwen3_5"), words(500, "small")
    with drafting(monkeypatch, target, None) as rig:
        plain = rig.ask(prompt, 10)
    monkeypatch.setattr(draft_model, "SHARE", 10**4)
    monkeypatch.setattr("headwater.engine.assembly.SHARE", PAGES // 6)
    with drafting(monkeypatch, target, target) as rig:
        assert rig.ask(prompt, 10).tokens == plain.tokens
        assert rig.engine.scheduler.speculation.accepted == 0
        wait_until_empty(model_of(rig))
        assert rig.ask(prompt, 3).tokens == plain.tokens[:3]  # the engine goes on


def test_tokens_that_one_of_the_models_lacks_are_not_drafted(loaded, monkeypatch) -> None:
    """Checkpoints of one tokenizer may have tables of different lengths."""
    target, prompt = loaded("qwen3_5"), words(80, "table")
    with drafting(monkeypatch, target, None) as rig:
        plain, other = rig.ask(prompt, 20), rig.ask([*prompt, target.spec.vocab_size - 1], 20)
    with drafting(monkeypatch, target, target) as rig:
        model, drafted = model_of(rig), []
        guess = model.guess
        model.guess = lambda *given: drafted.append(guess(*given)) or drafted[-1]
        model._vocab = target.spec.vocab_size - 1
        assert rig.ask(prompt, 20).tokens == plain.tokens
        tokens = [token for drafts in drafted for draft in drafts for token in draft.tokens]
        assert 0 <= min(tokens) <= max(tokens) < model._vocab
        drafted.clear()
        assert rig.ask([*prompt, target.spec.vocab_size - 1], 20).tokens == other.tokens
        assert not any(draft.tokens for drafts in drafted for draft in drafts)


def test_another_tokenizer_is_refused(loaded, checkpoint) -> None:
    target, tiny = loaded("qwen3_5"), load_model(checkpoint("headwater_tiny"), "float32")
    assert isinstance(tiny.tokenizer, Tokenizer)
    check_fits(loaded("mamba2"), target)
    with pytest.raises(SettingError, match=r"other numbers for them, 4,096 and [\d,]+"):
        check_fits(tiny, target)


def test_settings_that_contradict_each_other_are_refused(checkpoint, tmp_path) -> None:
    folder = checkpoint("qwen3_5")
    with pytest.raises(ConfigError, match="so draft_model must name a small model"):
        ServeConfig(model=folder, speculation="draft")
    with pytest.raises(ConfigError, match="but speculation is 'ngram': it needs 'draft' or 'auto'"):
        ServeConfig(model=folder, speculation="ngram", draft_model=folder)
    with pytest.raises(ConfigError, match="which is not a folder with a config"):
        ServeConfig(model=folder, speculation="draft", draft_model=tmp_path)
    assert ServeConfig(model=folder, speculation="auto", draft_model=folder).draft_model == folder
