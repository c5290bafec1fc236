"""Heads of multi-token prediction: their drafts against a layer of transformers', and what they leave as it is."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from headwater.draft.drafter import NO_DRAFT
from headwater.engine import mtp as engine_mtp
from headwater.engine.mtp import MAX_WAITING_ENTRIES, MtpRunner, filled_up
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.models import mtp
from headwater.models.load import load_model, read_spec
from headwater.models.mtp import MtpGraphs
from headwater.request import Drafting, Generation, SamplingParams, Span
from headwater.schedule.speculation import Speculator
from tests import checkpoints
from tests.checkpoints.mtp import FILE, add_head, copied
from tests.checkpoints.ring import Memory, RingModel
from tests.exactness.rig import Answer, Make, Rig, verify_every_draft, words

FAMILIES = ("qwen3_5", "qwen3_next", "qwen3_5_moe", "nemotron_h", "ling", "ling_2_5", "ring")
PAGES = 400
CLOSE = 2e-4  # of logits in float32


@pytest.fixture(scope="session")
def with_head(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a recipe's checkpoint with a random head."""
    root = tmp_path_factory.mktemp("heads")

    def folder_of(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            shutil.copytree(checkpoint(name), folder)
            add_head(folder)
        return folder

    return folder_of


@pytest.fixture
def make(with_head: Callable[[str], Path]) -> Callable[[str], Make]:
    return lambda name: Make(load_model(with_head(name), mtp=True), SelfCheck(True, None, "compiled"))


class Oracle:
    """The head of a checkpoint by layers of transformers', or of the tests' own model, over whole sequences."""

    def __init__(self, folder: Path) -> None:
        self.model, self.spec = checkpoints.oracle(folder), read_spec(folder)
        dtype = self.model.get_output_embeddings().weight.dtype
        self.stored = {name: tensor.to(dtype) for name, tensor in load_file(folder / FILE).items()}
        self.layers = sorted({int(block.parts[0].at.split(".")[1]) for block in copied(self.spec)})

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        inverse = (x.square().mean(-1, keepdim=True) + self.spec.norm_eps).rsqrt()
        return x * inverse * (self.spec.norm_offset + self.stored[name])

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """The model's hidden states [T, C], after the final norm."""
        if isinstance(self.model, RingModel):
            return self.model.hidden(torch.tensor([tokens]))
        return self.model.base_model(torch.tensor([tokens])).last_hidden_state[0]

    @torch.no_grad()
    def forward(self, tokens: list[int], before_MC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and hidden states [M, …] of a sequence's entries 1 to M; `before_MC` are the states before each."""
        head = self.spec.mtp
        ids = torch.tensor(tokens[1 : 1 + len(before_MC)])
        embedded = self.norm(self.model.get_input_embeddings()(ids), head.embedding_norm)
        both = torch.cat((embedded, self.norm(before_MC, head.hidden_norm)), dim=-1)
        x = both @ self.stored[head.product].T
        blocks = self.own_blocks if isinstance(self.model, RingModel) else self.blocks
        last = self.norm(blocks(x), head.final_norm)
        return self.model.get_output_embeddings()(last), last

    def own_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """The head's blocks over entries from position 1 on, [M, C]."""
        for number in self.layers:
            x = self.model.model.layers[number](x, Memory(length=1))
        return x

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        """The same by transformers."""
        body, at, x = self.model.base_model, torch.arange(1, 1 + len(x))[None], x[None]
        mask = torch.full((at.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        angles = {"position_embeddings": body.rotary_emb(x, at)} if hasattr(body, "rotary_emb") else {}
        for number in self.layers:
            out = body.layers[number](x, attention_mask=mask, position_ids=at, **angles)
            x = out[0] if isinstance(out, tuple) else out
        return x.view(at.shape[1], -1)

    def drafted(self, tokens: list[int], n: int) -> list[torch.Tensor]:
        """The logits of each of n drafts after these tokens."""
        before, tokens, logits = self.hidden(tokens[:-1]), list(tokens), list[torch.Tensor]()
        for _ in range(n):
            all_logits, last = self.forward(tokens, before)
            logits.append(all_logits[-1])
            tokens.append(int(all_logits[-1].argmax()))
            before = torch.cat((before, last[-1:]))
        return logits


@dataclass
class Pass:
    """One pass of a head: positions of its rows, and the logits of those that draft."""

    positions: list[int]
    logits: torch.Tensor


@contextmanager
def always_drafting(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> Iterator[list[Pass]]:
    """Let the head draft in every step; yields its passes."""
    passes, forward = list[Pass](), MtpGraphs.forward

    def noted(self, batch, hidden_NC):
        logits, hidden = forward(self, batch, hidden_NC)
        passes.append(Pass(batch.position_N.tolist(), logits.clone()))
        return logits, hidden

    with monkeypatch.context() as patched:
        patched.setattr(MtpGraphs, "forward", noted)
        patched.setattr(Speculator, "wants_head", lambda self, least, cheap: self.uses_head)
        verify_every_draft(rig.engine.scheduler.speculation)
        yield passes


def furthest(passes: list[Pass], oracle: Oracle, tokens: list[int]) -> float:
    """The greatest difference of a pass over one sequence, which drafts one token, from transformers' layer."""
    logits, _ = oracle.forward(tokens, oracle.hidden(tokens)[:-1])
    return max((one.logits[-1] - logits[one.positions[-1] - 1]).abs().max().item() for one in passes)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_the_head_over_the_whole_text(family, make, with_head, monkeypatch) -> None:
    """Prompts in several legs, and one that resumes after a cached prefix and an answer."""
    oracle, made = Oracle(with_head(family)), make(family)
    with made(PAGES, speculation="mtp", max_tokens_per_step=128) as rig, always_drafting(monkeypatch, rig) as passes:
        once = Drafting(tokens=1)
        first = rig.ask(words(300, family), 20, drafting=once)
        assert len(passes) == 18  # after the first token and before the last
        assert furthest(passes, oracle, first.everything) < CLOSE
        rig.settle()
        passes.clear()
        second = rig.ask([*first.everything, *words(70, "next")], 20, drafting=once)
        assert second.account.cached_tokens >= 256
        assert furthest(passes, oracle, second.everything) < CLOSE


def test_entries_that_wait_longest_are_written_with_those_of_other_sequences(make, with_head, monkeypatch) -> None:
    """Three sequences, whose head drafts now and then, when up to 32 entries wait."""
    oracle, made = Oracle(with_head("qwen3_5")), make("qwen3_5")
    asked, drafting, stored = [0], list[list[int]](), list[list[int]]()
    found = list[tuple[list[int], torch.Tensor]]()
    guess, best_of, store = MtpRunner.guess, engine_mtp.best_of, MtpRunner._store

    def now_and_then(self, wanted, least):
        asked[0] += 1
        if asked[0] not in (14, 27, 60, 61):
            return [NO_DRAFT for _ in wanted]
        drafting[:] = [list(seq.tokens[: seq.computed + 1]) for seq, _ in wanted if self._of(seq)]
        return guess(self, wanted, least)

    def noted(logits_SV):
        found.extend((tokens, row_V.clone()) for tokens, row_V in zip(drafting, logits_SV, strict=False))
        return best_of(logits_SV)

    def noted_store(self, entries):
        stored.append([len(one.tokens) for one in entries])
        store(self, entries)

    with made(PAGES, speculation="mtp", max_running=4) as rig, monkeypatch.context() as patched:
        patched.setattr(MtpRunner, "guess", now_and_then)
        patched.setattr(engine_mtp, "best_of", noted)
        patched.setattr(MtpRunner, "_store", noted_store)
        patched.setattr(Speculator, "is_paused", lambda self, time_is_left: False)
        patched.setattr(Speculator, "wants_head", lambda self, least, cheap: self.uses_head)
        verify_every_draft(rig.engine.scheduler.speculation)
        prompts = [words(100 + 37 * i, "waits", i) for i in range(3)]
        answers = [rig.submit(prompt, 90, drafting=Drafting(tokens=1)) for prompt in prompts]
        texts = [rig.wait(answer).everything for answer in answers]
    assert any(len(lengths) > 1 and max(lengths) == MAX_WAITING_ENTRIES for lengths in stored)
    assert len(found) >= 9
    for tokens, row_V in found:
        assert any(text[: len(tokens)] == tokens for text in texts)
        logits, _ = oracle.forward(tokens, oracle.hidden(tokens)[:-1])
        assert (row_V - logits[len(tokens) - 2]).abs().max().item() < CLOSE


def test_lost_hidden_state_and_unmasked_position_are_detected(make, with_head, monkeypatch) -> None:
    oracle, made = Oracle(with_head("qwen3_5")), make("qwen3_5")

    def after_a_hit() -> float:
        with made(PAGES, speculation="mtp") as rig, always_drafting(monkeypatch, rig) as passes:
            first = rig.ask(words(66, "lost"), 2)
            rig.settle()
            passes.clear()
            second = rig.ask([*first.prompt, *words(3, "next")], 6, drafting=Drafting(tokens=1))
            assert second.account.cached_tokens == 66
            return furthest(passes, oracle, second.everything)

    assert after_a_hit() < CLOSE
    with monkeypatch.context() as patched:
        patched.setattr(engine_mtp.MtpRunner, "_before", lambda self, leg, s: None)
        assert after_a_hit() > 10 * CLOSE
    with monkeypatch.context() as patched:
        patched.setattr(mtp, "FIRST_ENTRY", 0)
        assert after_a_hit() > 10 * CLOSE


def test_later_drafts_follow_from_the_head_s_own_hidden_states(make, with_head, monkeypatch) -> None:
    oracle, made = Oracle(with_head("qwen3_5")), make("qwen3_5")
    with made(PAGES, speculation="mtp") as rig, always_drafting(monkeypatch, rig) as passes:
        answer = rig.ask(words(100, "chain"), 6, drafting=Drafting(tokens=3))
    wanted = oracle.drafted(answer.everything[:101], 3)
    for one, logits in zip(passes[:3], wanted, strict=True):
        assert (one.logits[-1] - logits).abs().max() < CLOSE


def test_answers_and_cache_are_those_without_a_head(make, monkeypatch) -> None:
    made, told = make("qwen3_5"), []
    prompts = [words(90 + 40 * i, "same", i) for i in range(4)]
    for speculation in ("off", "mtp"):
        with made(PAGES, speculation=speculation) as rig, always_drafting(monkeypatch, rig) as passes:
            answers = [rig.wait(answer) for answer in [rig.submit(prompt, 30) for prompt in prompts]]
            rig.settle()
            again = [rig.ask([*a.everything, *words(5, i)], 10) for i, a in enumerate(answers)]
            told.append([*answers, *again])
            assert bool(passes) == (speculation == "mtp")
            assert (rig.engine.scheduler.speculation.rejected > 0) == (speculation == "mtp")
    for plain, drafted in zip(*told, strict=True):
        assert plain.tokens == drafted.tokens
        assert plain.same_bits(drafted)
        assert plain.account == drafted.account


def test_right_drafts_are_accepted(make, monkeypatch) -> None:
    """The head is made to know the answer: a step then gives as many tokens as it drafts, and one."""
    made, prompt = make("qwen3_5"), words(120, "right")
    with made(PAGES) as rig:
        known = rig.ask(prompt, 40)

    def knowing(self, batch, hidden_NC):
        logits, hidden = forward(self, batch, hidden_NC)
        at = batch.position_N if batch.wants_all else batch.position_N[batch.logits_row_R]
        return torch.nn.functional.one_hot(
            torch.tensor(known.everything + [0] * 9)[at + 1], logits.shape[1]
        ) * 50.0, hidden

    forward = MtpGraphs.forward
    settings = {"speculation": "mtp", "decode_reuse": "none"}  # no step after the answer prefills it
    with made(PAGES, **settings) as rig, always_drafting(monkeypatch, rig):
        monkeypatch.setattr(MtpGraphs, "forward", knowing)
        before = rig.engine.stats().steps
        answer = rig.ask(prompt, 40)
        assert answer.tokens == known.tokens
        assert answer.same_bits(known)
        speculation = rig.engine.scheduler.speculation
        assert speculation.rejected == 0
        assert speculation.accepted == 4 * 7  # of steps that did not end the answer
        assert rig.engine.stats().steps - before == 1 + 8  # of 5 tokens each, the last one of fewer


@pytest.mark.parametrize("tokens", [1, 4])
def test_first_tokens_are_sent_before_entries_are_written_which_are_the_same(make, monkeypatch, tokens) -> None:
    """Tokens that were sent when each leg's entries are written; an answer may end at its first token."""
    made, entries, sent = make("qwen3_5"), list[torch.Tensor](), list[list[int]]()
    store, take = MtpRunner._store, MtpRunner.take

    def at_once(self, step, batch, hidden_NC):
        take(self, step, batch, hidden_NC)
        self.write()

    for patched in ({"take": at_once}, {}):
        with made(PAGES, speculation="mtp", max_tokens_per_step=128) as rig, monkeypatch.context() as of_head:
            answer, told = Answer([], 0), list[int]()

            def noted(self, entries, answer=answer, told=told):
                told.extend(len(answer.tokens) for _ in entries)
                store(self, entries)

            for name, method in ({"_store": noted} | patched).items():
                of_head.setattr(MtpRunner, name, method)
            params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
            asked = Generation(tuple(words(300, "first")), params, keep_output=False)
            rig.engine.submit(asked, rig._listener(answer))
            rig.wait(answer)
            rig.settle()
            mtp = rig.engine.runner.mtp
            entries.append(mtp.arena.pages[torch.from_numpy(mtp.complete_P)].clone())
            sent.append(told[:3])
    assert sent == [[0, 0, 0], [0, 0, 1]]
    assert len(entries[0]) == 5  # four whole pages and the tail's
    assert torch.equal(*entries)


def test_copy_of_a_prefix_waits_for_its_entries(make) -> None:
    """They are asked for while the first token is chosen, and written, too, if the answer is given up then."""
    made, told = make("qwen3_5"), list[bool]()

    def failing(event: object) -> None:
        raise ValueError(event)

    with made(PAGES, speculation="mtp") as rig:
        mtp, waiting = rig.engine.runner.mtp, list[threading.Thread]()

        def asks(request: int, logits_V: torch.Tensor) -> None:
            pages = rig.engine.scheduler.running[request].table[:2]
            assert not mtp.complete_P[pages].any()
            waiting.append(threading.Thread(target=lambda: told.append(mtp.complete(pages))))
            waiting[-1].start()

        rig.engine.verification.logits_tap = asks
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        rig.engine.submit(Generation(tuple(words(130, "given up")), params), failing)
        rig.settle()
        rig.ask(words(130, "kept"), 1)
        for thread in waiting:
            thread.join()
    assert told == [True, True]


def test_entries_that_cannot_be_written_cost_no_answer(make, monkeypatch) -> None:
    made, prompt = make("qwen3_5"), words(130, "broken")
    with made(PAGES, speculation="mtp") as rig:
        mtp = rig.engine.runner.mtp
        mtp.arena.pages.fill_(1)
        monkeypatch.setattr(MtpRunner, "_store", lambda self, entries: 1 / len([]) if entries else None)
        first = rig.ask(prompt, 1, keep_output=False)
        monkeypatch.undo()
        assert not mtp.complete_P.any()
        assert (mtp.arena.pages == 0).all(1).sum() == 4, "another sequence's entries are not read"
        again = rig.ask(prompt, 1, keep_output=False)
        assert again.account.cached_tokens == 130
        assert again.same_bits(first)


def test_a_checkpoint_without_a_head_is_refused(checkpoint, tmp_path) -> None:
    from headwater.config import ServeConfig
    from headwater.engine.engine import Engine
    from headwater.setting import SettingError

    for name, why in (("qwen3_5", "tensor 'mtp.fc.weight' is missing"), ("bamba", "its family has none")):
        with pytest.raises(SettingError, match=why):
            Engine.load(ServeConfig(model=checkpoint(name), speculation="mtp"))


def test_head_needs_memory_for_each_page(make) -> None:
    made, told = make("qwen3_5"), {}
    for speculation in ("off", "mtp"):
        with made(PAGES, speculation=speculation) as rig:
            told[speculation] = rig.engine
    spec = made.loaded.spec
    pages = told["mtp"].scheduler.layout.n_pages
    left = PAGES * spec.page_bytes - told["mtp"].draft_bytes
    assert pages == left * spec.page_bytes // (spec.page_bytes + spec.mtp_page_bytes) // spec.page_bytes
    assert told["mtp"].mtp_bytes == pages * spec.mtp_page_bytes
    assert told["off"].mtp_bytes == 0
    assert told["mtp"].runner.mtp.arena.pages.nbytes + told["mtp"].runner.mtp.last_PC.nbytes == told["mtp"].mtp_bytes


def test_a_head_drafts_for_composed_prompts_and_changes_none(make) -> None:
    """Interiors have no entries: what stood on their pages before is not read."""
    made, told = make("qwen3_5"), []
    document, question = words(200, "document"), words(40, "question")
    for speculation in ("off", "mtp"):
        with made(PAGES, speculation=speculation) as rig:
            rig.ask(words(300, "before"), 4)
            spans = (Span(10, 210),)
            answers = [
                rig.ask([*words(10, i), *document, *question], 20, segments=spans, keep_output=False) for i in range(2)
            ]
            assert answers[1].account.composed_tokens > 100
            told.append([(answer.tokens, answer.account) for answer in answers])
    assert told[0] == told[1]


def test_padding_rows_do_not_count_as_all_rows() -> None:
    """Three sequences with 1, 2 and 1 entries that wait: as many rows as drafts after both are filled up."""
    runner = object.__new__(MtpRunner)
    runner.device, runner.page_size = "cpu", 64
    seqs = [SimpleNamespace(id=i, slot=i, table=[i]) for i in range(3)]
    rows = [(seqs[0], 5, 1), (seqs[1], 6, 2), (seqs[1], 7, 3), (seqs[2], 8, 4)]
    uneven, even = runner._batch(rows, filled_up([0, 2, 3])), runner._batch(rows[:2], filled_up([0, 1]))
    assert uneven.logits_row_R.tolist() == [0, 2, 3, 3]
    assert (uneven.wants_all, even.wants_all) == (False, True)
