"""An executor that computes nothing and remembers everything: what each page and each slot holds, token by token.

It stands in the place of torch and fails on the first read of something that is not what the plan promised: a page
that was given to somebody else meanwhile, a checkpoint of another prefix, KV that a decode step wrote where only what
a prefill wrote may be read.
"""

import random
from collections.abc import Callable

from headwater.cache.placement import make_placement
from headwater.cache.prefix_cache import NoCache, PrefixCache
from headwater.draft.drafter import accepted
from headwater.errors import OutOfPages
from headwater.plan import CacheLayout, Tail
from headwater.request import Generation, Healing, SamplingParams
from headwater.schedule.kinds.request import Request
from headwater.schedule.limits import Limits
from headwater.schedule.planner import DecodeReuse
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import Phase
from headwater.schedule.speculation import Speculation
from headwater.schedule.step import Decode, Leg, Step

PREFILL, DECODE = "prefill", "decode"
VOCABULARY = 50


class Ledger:
    """Memory as labels: (hash of the tokens so far, who wrote it)."""

    def __init__(self, page_size: int, exact: bool = True) -> None:
        self.page_size, self.exact = page_size, exact
        self.pages: dict[int, list] = {}
        self.slots: dict[int, tuple] = {}
        self.prefilled = 0
        self._labels: dict[int, list[int]] = {}

    def label(self, seq: Request, n: int) -> int:
        """Stands for a sequence's first n tokens."""
        labels = self._labels.setdefault(seq.id, [0])
        for token in seq.tokens[len(labels) - 1 : n]:
            labels.append(hash((labels[-1], token)))
        return labels[n]

    def run(self, step: Step) -> dict[int, list[int]]:
        """Do what the step says; return the next token of each request that wants one, and those after its drafts."""
        assert len({item.seq.id for item in step.items}) == len(step.items)
        for leg in step.legs:  # restores come before any write
            self._restore(leg)
        for leg in step.legs:
            self._prefill(leg)
        for decode in step.decodes:
            if decode.accepted:
                self._accept(decode)
            for position, token in zip(decode.positions[: decode.count], decode.tokens, strict=False):
                self._decode(decode.seq, token, position)
            for position in decode.positions[decode.count :]:
                self._write(decode.seq.table, position, ("draft", decode.seq.id))
            for save in decode.plan.saves if decode.plan else ():
                self._save(save.pages, self.slots[decode.seq.slot])
        drafts = {decode.seq.id: decode.drafts for decode in step.decodes}
        return {
            item.seq.id: [
                next_token([*item.seq.tokens, *drafts.get(item.seq.id, ())[:n]])
                for n in range(1 + len(drafts.get(item.seq.id, ())))
            ]
            for item in step.items
            if item.wants_token
        }

    def _accept(self, decode: Decode) -> None:
        """Drafts of the step before are part of the sequence: what they wrote is a decode's, and so is their state."""
        seq = decode.seq
        for position in range(seq.computed - decode.accepted, seq.computed):
            assert self.slots[seq.slot][0] == self.label(seq, position)
            held = self.pages[seq.table[position // self.page_size]]
            assert held[position % self.page_size] == ("draft", seq.id)
            held[position % self.page_size] = (self.label(seq, position + 1), DECODE)
            self.slots[seq.slot] = (self.label(seq, position + 1), DECODE)

    def _restore(self, leg: Leg) -> None:
        plan, kept = leg.plan, leg.plan.kept
        if plan.restore:
            held = [self.pages[p] for p in plan.restore]
            assert all(h == ("checkpoint", i, held[0][2]) for i, h in enumerate(held)), held
            self.slots[leg.seq.slot] = held[0][2]
        elif plan.start == 0 or (kept is not None and kept.start == 0):
            self.slots[leg.seq.slot] = (self.label(leg.seq, 0), PREFILL)
        if kept is not None:
            self._continue(leg, kept)
        who = PREFILL if self.exact else self.slots[leg.seq.slot][1]
        assert self.slots[leg.seq.slot] == (self.label(leg.seq, plan.start), who)

    def _continue(self, leg: Leg, kept: Tail) -> None:
        """Advance the slot over the tokens of a tail, and copy their KV to the leg's own page."""
        plan, seq = leg.plan, leg.seq
        who = PREFILL if self.exact else self.slots[seq.slot][1]
        assert self.slots[seq.slot] == (self.label(seq, kept.start), who)
        assert kept.end == plan.start
        labels = [self.label(seq, at + 1) for at in range(kept.start, kept.end)]
        n = len(labels)
        for part, page in enumerate(kept.rows):
            name, its_part, its_labels, hidden = self.pages[page]
            assert (name, its_part, its_labels[:n]) == ("tail", part, labels)
            assert not kept.has_hidden or hidden == labels[-1]
        (page,) = kept.kv
        held = self.pages[page][:n]
        assert [label for label, _ in held] == labels
        assert not self.exact or {who for _, who in held} == {PREFILL}
        own = kept.start // self.page_size
        if own >= plan.write_from:
            self.pages[plan.table[own]] = held + [None] * (self.page_size - n)
        self.slots[seq.slot] = (self.label(seq, plan.start), PREFILL)

    def _keep(self, leg: Leg, tail: Tail) -> None:
        plan, seq = leg.plan, leg.seq
        assert (plan.start if plan.kept is None else plan.kept.start) <= tail.start < tail.end <= plan.end
        assert tail.end - tail.start <= self.page_size
        labels = [self.label(seq, at + 1) for at in range(tail.start, tail.end)]
        assert tail.has_hidden == (tail.end == seq.n_prompt)
        for part, page in enumerate(tail.rows):
            self.pages[page] = ("tail", part, labels, labels[-1] if tail.has_hidden else None)
        for page in tail.kv:
            self.pages[page] = list(self.pages[plan.table[tail.start // self.page_size]])

    def _prefill(self, leg: Leg) -> None:
        plan, seq = leg.plan, leg.seq
        assert plan.end <= seq.n_prompt
        assert len(plan.table) == -(-plan.end // self.page_size)
        self._check_kv(seq, plan.table, plan.start, only=PREFILL if self.exact else None)
        for position in range(plan.start, plan.end):
            if position // self.page_size >= plan.write_from:
                self._write(plan.table, position, (self.label(seq, position + 1), PREFILL))
        self._check_kv(seq, plan.table, plan.end, only=PREFILL if self.exact else None)
        self.prefilled += plan.end - plan.start
        for save in plan.saves:
            assert (plan.start if plan.kept is None else plan.kept.start) < save.position <= plan.end
            self._save(save.pages, (self.label(seq, save.position), PREFILL))
        for tail in plan.tails:
            self._keep(leg, tail)
        self.slots[seq.slot] = (self.label(seq, plan.end), PREFILL)

    def _decode(self, seq: Request, token: int, position: int) -> None:
        assert token == seq.tokens[position]
        assert self.slots[seq.slot][0] == self.label(seq, position)
        self._check_kv(seq, seq.table, position, only=None)
        self._write(seq.table, position, (self.label(seq, position + 1), DECODE))
        self.slots[seq.slot] = (self.label(seq, position + 1), DECODE)

    def _check_kv(self, seq: Request, table: tuple[int, ...], end: int, only: str | None) -> None:
        """All KV of [0, end) is this request's; the prompt's is a prefill's, the output's its own decode's."""
        for position in range(end):
            held, who = self.pages[table[position // self.page_size]][position % self.page_size]
            assert held == self.label(seq, position + 1), f"position {position} of request {seq.id}"
            if self.exact:
                assert who == (only or (PREFILL if position < seq.n_prompt else DECODE))

    def _write(self, table: tuple[int, ...], position: int, what: tuple) -> None:
        page = table[position // self.page_size]
        if position % self.page_size == 0 or not isinstance(self.pages.get(page), list):
            self.pages[page] = [None] * self.page_size
        self.pages[page][position % self.page_size] = what

    def _save(self, pages: tuple[int, ...], state: tuple) -> None:
        for i, page in enumerate(pages):
            self.pages[page] = ("checkpoint", i, state)


def next_token(tokens: list[int]) -> int:
    return random.Random(hash(tuple(tokens))).randrange(VOCABULARY)


class Lab:
    """A scheduler over a real cache and the ledger."""

    def __init__(
        self,
        n_pages: int = 400,
        page_size: int = 4,
        checkpoint_pages: int = 2,
        max_running: int = 8,
        tokens_per_step: int = 64,
        placement: str = "headwater",
        eviction: str = "lru",
        decode_reuse: DecodeReuse = "canonical",
        cache: bool = True,
        healing: Healing = Healing.OFF,
        state_fraction: float | None = None,
        elastic_pages: int = 0,
        max_model_len: int = 10_000,
        speculation: Speculation | None = None,
        tails: bool = False,
    ) -> None:
        self.layout = CacheLayout(
            n_pages=n_pages, page_size=page_size, unit_tokens=page_size, unit_bytes=4 * page_size,
            checkpoint_pages=checkpoint_pages, slot_pages=checkpoint_pages, state_fraction=state_fraction,
            elastic_pages=elastic_pages, tail_pages=tuple(1 + n // 3 for n in range(page_size + 1)) if tails else (),
        )  # fmt: skip
        self.cache = PrefixCache(self.layout, eviction) if cache else NoCache(self.layout)
        limits = Limits(max_running, tokens_per_step, saves_per_step=16, max_model_len=max_model_len)
        self.scheduler = Scheduler(
            self.cache, make_placement(placement), limits, decode_reuse, healing=healing, speculation=speculation
        )
        self.ledger = Ledger(page_size, exact=decode_reuse != "raw")
        self.steps = 0
        self.seconds: Callable[[int, int], float] = lambda rows, drafts: 0.010 + 0.001 * rows  # of a step without legs
        self.rows: list[dict[int, int]] = []  # of each step: rows of each decoding sequence

    def submit(self, prompt: list[int], max_tokens: int = 1, **generation) -> Request:
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        return self.scheduler.submit(Generation(tuple(prompt), params, **generation))

    def step(self) -> None:
        step = self.scheduler.plan_step()
        tokens = self.ledger.run(step)
        self.rows.append({decode.seq.id: decode.rows for decode in step.decodes})
        drafts = {decode.seq.id: decode.drafts for decode in step.decodes}
        rows, n_drafts, n_right = sum(decode.rows for decode in step.decodes), sum(map(len, drafts.values())), 0
        for seq in self.scheduler.finish_step(step):
            guesses = drafts.get(seq.id, ())
            right = accepted(guesses, tokens[seq.id])
            n_right += right
            seq.tokens += tokens[seq.id][: right + 1]
            if seq.n_output >= seq.generation.params.max_tokens:
                self.scheduler.finish(seq)
            elif guesses:
                self.scheduler.accept(seq, len(guesses), right)
        seconds = self.seconds(rows, n_drafts)
        self.scheduler.speculation.asking.earn_share(seconds)
        if not step.legs:
            self.scheduler.speculation.note_step(rows, n_drafts, n_right, seconds)
        assert all(isinstance(error, OutOfPages) for _, error in self.scheduler.failures), self.scheduler.failures
        self.cache.check()
        self.steps += 1

    def run(self, most: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(most):
            if self.scheduler.idle:
                assert not self.scheduler.failures
                return
            self.step()
        raise AssertionError(f"not idle after {most} steps: {self.scheduler}")

    def ask(self, prompt: list[int], max_tokens: int = 1, **generation) -> Request:
        seq = self.submit(prompt, max_tokens, **generation)
        self.run()
        assert seq.phase is Phase.DONE
        return seq


def words(n: int, *seed: object) -> list[int]:
    """A prompt of n tokens that no other seed shares a beginning with."""
    rng = random.Random(repr(seed))
    return [rng.randrange(1000, 100_000) for _ in range(n)]
