"""The runner's legs that continue tails, and write some: plans by hand, without a cache."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from headwater.engine.mtp import MtpRunner
from headwater.engine.runner import Runner
from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.models.files import embedded
from headwater.models.load import load_model
from headwater.plan import Plan, Save, Tail
from headwater.schedule.sequence import Phase
from headwater.schedule.step import Decode, Leg, Step

TOKENS = random.Random(3).choices(range(1, 200), k=400)
PAGE, SLOTS, N_PAGES = 64, 8, 400


@dataclass
class Fake:
    """The fields of a sequence that the runner reads."""

    id: int
    slot: int
    table: list[int]
    n_prompt: int
    tokens: list[int] = field(default_factory=lambda: list(TOKENS))
    computed: int = 0
    scores_prompt: bool = False
    phase: Phase = Phase.PREFILL

    def wants_token_after(self, end: int) -> bool:
        return end >= self.n_prompt


class Bench:
    """A runner, and pages that are handed out in a shuffled order."""

    def __init__(self, folder: Path, mtp: bool = False) -> None:
        loaded = load_model(folder, "float32", mtp=mtp)
        self.model = loaded.model
        spec = self.model.spec
        self.arena = Arena(spec, N_PAGES)
        self.arena.pages.fill_(0xFF)
        rows = StateMemory(spec.state, 2 * SLOTS + 20, max(1, spec.checkpoint_pages) * spec.page_bytes)
        self.mtp = None if loaded.mtp is None else MtpRunner(loaded.mtp, N_PAGES, SLOTS)
        self.runner = Runner(self.model, self.arena, rows, SLOTS, self.mtp)
        self.free = random.Random(1).sample(range(N_PAGES), N_PAGES)
        self.n_seqs = 0

    def take(self, n: int) -> list[int]:
        taken, self.free = self.free[:n], self.free[n:]
        return taken

    def seq(self, n_prompt: int, shared: Fake | None = None, until: int = 0) -> Fake:
        """A sequence, whose first pages are those of another one."""
        self.n_seqs += 1
        first = shared.table[: until // PAGE] if shared else []
        return Fake(self.n_seqs, self.n_seqs % SLOTS, [*first, *self.take(n_prompt // PAGE + 2 - len(first))], n_prompt)

    def plan(self, seq: Fake, start: int, end: int, **more) -> Leg:
        table = seq.table[: -(-end // PAGE)] if self.model.spec.attention_layers else []
        return Leg(
            seq,
            Plan(0, seq.id, start, end, more.pop("restore", ()), table, start // PAGE, more.pop("saves", ()), **more),
        )

    def tail(self, start: int, end: int, has_hidden: bool = True) -> Tail:
        """An empty tail."""
        spec = self.model.spec
        kv = self.take(1) if spec.attention_layers else ()
        return Tail(start, end, kv, self.take(spec.tail.pages(end - start, spec.page_bytes)), has_hidden)

    def run(self, *legs: Leg, decodes: tuple[Decode, ...] = ()) -> torch.Tensor:
        logits = self.runner.run(Step(legs, decodes))
        for leg in legs:
            leg.seq.computed = leg.plan.end
        self.runner.end_step()
        return logits

    def first(self, n_prompt: int, at: int) -> tuple[Fake, Save, Tail, torch.Tensor]:
        """Prefill a prompt in one leg, which saves its last page's checkpoint and writes a tail up to `at`."""
        seq = self.seq(n_prompt)
        save = Save(at // PAGE * PAGE, self.take(self.model.spec.checkpoint_pages))
        tail = self.tail(save.position, at, at == n_prompt)
        logits = self.run(self.plan(seq, 0, n_prompt, saves=(save,) if save.position else (), tails=(tail,)))
        return seq, save, tail, logits

    def decoded(self, *seqs: Fake, n: int = 3) -> list[torch.Tensor]:
        """The logits of some tokens that follow."""
        found = []
        for token in range(n):
            for seq in seqs:
                seq.tokens[seq.computed : seq.computed + 1] = [50 + token]
            found.append(self.run(decodes=tuple(Decode(seq) for seq in seqs)).clone())  # the next step writes there
            for seq in seqs:
                seq.computed += 1
        return found


@pytest.fixture(params=["qwen3_5", "granite_moe", pytest.param("mamba2", marks=pytest.mark.full), "qwen3_window"])
def bench(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Bench:
    return Bench(checkpoint(request.param))


def test_leg_after_tail_has_logits_of_first_leg(bench: Bench) -> None:
    """The tail's own page is copied: what the second sequence computes after it does not change the tail."""
    like, save, tail, _ = bench.first(230, 128 + 31)
    wanted_seq = bench.seq(230)
    wanted = bench.run(bench.plan(wanted_seq, 0, 230))
    for _ in range(2):
        seq = bench.seq(230, like, 128)
        seq.tokens[180:] = TOKENS[:220]
        other = bench.run(bench.plan(seq, 159, 230, restore=save.pages, kept=tail))
        assert not torch.equal(other, wanted)
        seq = bench.seq(230, like, 128)
        got = bench.run(bench.plan(seq, 159, 230, restore=save.pages, kept=tail))
        assert torch.equal(got, wanted)
    assert all(map(torch.equal, bench.decoded(seq), bench.decoded(wanted_seq)))


def test_page_of_tail_that_is_shared_and_not_copied_is_found(checkpoint: Callable[[str], Path]) -> None:
    """A sequence writes its own KV after the tail's, where another one that continues the tail has its own."""
    bench = Bench(checkpoint("qwen3_5"))
    like, save, tail, _ = bench.first(230, 128 + 31)

    def answer(is_shared: bool) -> list[torch.Tensor]:
        seqs = [bench.seq(230, like, 128) for _ in range(2)]
        seqs[1].tokens[159:] = TOKENS[:241]
        for seq in seqs:
            seq.table[2:3] = tail.kv if is_shared else seq.table[2:3]
            bench.run(bench.plan(seq, 159, 230, restore=save.pages, kept=tail))
        return bench.decoded(seqs[0])

    wanted = bench.decoded(like)
    assert all(map(torch.equal, answer(is_shared=False), wanted))
    assert not any(map(torch.equal, answer(is_shared=True), wanted))


def test_hidden_row_of_another_prompt_is_found(bench: Bench) -> None:
    like, save, tail, wanted = bench.first(200, 200)
    other = bench.tail(192, 199)
    bench.run(bench.plan(bench.seq(199, like, 192), 195, 199, restore=save.pages, kept=tail, tails=(other,)))
    hidden_bytes = bench.model.spec.tail.bytes(0)
    for source, is_same in ((tail, True), (other, False)):
        row = bench.arena.pages[source.rows[0], :hidden_bytes].clone()
        bench.arena.pages[tail.rows[0], :hidden_bytes] = row
        got = bench.run(bench.plan(bench.seq(200, like, 192), 200, 200, restore=save.pages, kept=tail))
        assert torch.equal(got, wanted) == is_same


def test_leg_without_rows_has_first_token_and_answer_of_first_leg(bench: Bench) -> None:
    """Its row of logits is in its place among others, and its states are there for the next step."""
    like, save, tail, wanted = bench.first(200, 200)
    seq, last = bench.seq(200, like, 192), bench.seq(200, like, 192)
    between = bench.seq(90)
    got = bench.run(
        bench.plan(seq, 200, 200, restore=save.pages, kept=tail),
        bench.plan(between, 0, 90),
        bench.plan(last, 200, 200, restore=save.pages, kept=tail),
    )
    alone = bench.run(bench.plan(bench.seq(90), 0, 90))
    assert torch.equal(got, torch.cat((wanted, alone, wanted)))
    answers = bench.decoded(seq), bench.decoded(last), bench.decoded(like)
    assert all(torch.equal(a, c) and torch.equal(b, c) for a, b, c in zip(*answers, strict=True))


def test_tail_at_page_has_only_a_hidden_row(bench: Bench) -> None:
    """A prompt of whole pages is repeated without computing a token."""
    like, save, tail, wanted = bench.first(192, 192)
    assert (tail.start, tail.end, len(tail.rows)) == (192, 192, 1)
    seq = bench.seq(192, like, 192)
    got = bench.run(bench.plan(seq, 192, 192, restore=save.pages, kept=tail))
    assert torch.equal(got, wanted)
    assert all(map(torch.equal, bench.decoded(seq), bench.decoded(like)))


def test_leg_after_tail_writes_a_longer_one(bench: Bench) -> None:
    like, save, tail, _ = bench.first(150, 150)
    longer = bench.tail(128, 170)
    second = bench.seq(170, like, 128)
    wanted = bench.run(bench.plan(second, 150, 170, restore=save.pages, kept=tail, tails=(longer,)))
    seq, shorter = bench.seq(170, like, 128), bench.seq(230, like, 128)
    got = bench.run(
        bench.plan(seq, 170, 170, restore=save.pages, kept=longer),
        bench.plan(shorter, 141, 230, restore=save.pages, kept=longer),
    )
    whole = bench.run(bench.plan(bench.seq(230), 0, 230))
    assert torch.equal(got, torch.cat((wanted, whole)))


def test_prompt_shorter_than_page_continues_after_tail(bench: Bench) -> None:
    """There is no checkpoint before it: the state is that of no tokens."""
    _, _, tail, _ = bench.first(20, 20)
    seq = bench.seq(50)
    bench.runner.states.bytes_RB[seq.slot] = 0xFF
    got = bench.run(bench.plan(seq, 20, 50, kept=tail))
    assert torch.equal(got, bench.run(bench.plan(bench.seq(50), 0, 50)))


def test_rows_of_tail_memory_are_given_back(bench: Bench) -> None:
    like, save, tail, _ = bench.first(150, 150)
    seqs = [bench.seq(160, like, 128) for _ in range(4)]
    bench.run(*(bench.plan(seq, 150, 160, restore=save.pages, kept=tail) for seq in seqs))
    memory = bench.runner.tails.memory
    assert len(memory) == 4
    assert memory.bytes_RB[:2].any()
    assert not memory.bytes_RB[2:].any()


def test_drafts_after_tail_are_those_of_whole_prompt() -> None:
    """The MTP head's entries of a tail's tokens are copied with it, and its hidden row is the one that waits."""
    bench = Bench(embedded(), mtp=True)
    assert bench.mtp is not None
    like, save, tail, _ = bench.first(170, 170)
    whole, repeated, continued = bench.seq(230), bench.seq(170, like, 128), bench.seq(230, like, 128)
    bench.run(bench.plan(whole, 0, 230))
    bench.run(bench.plan(repeated, 170, 170, restore=save.pages, kept=tail))
    bench.run(bench.plan(continued, 170, 230, restore=save.pages, kept=tail))
    wanted, got, *others = bench.mtp.guess([(seq, 3) for seq in (whole, continued, like, repeated)], 0.0)
    assert wanted.tokens
    assert got == wanted
    assert others[0] == others[1]
    for layer in bench.mtp.module.spec.attention_layers:
        tables = [torch.tensor(seq.table) for seq in (whole, continued)]
        entries = [bench.mtp.arena.read(layer, table, 128, 230) for table in tables]
        assert all(map(torch.equal, *entries))
