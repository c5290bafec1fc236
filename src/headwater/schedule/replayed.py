"""Recorded requests as the scheduler's sequences, with a key and a length but no tokens, and their prefill."""

from __future__ import annotations

from headwater.account import CacheAccount
from headwater.cache import PrefixCache
from headwater.errors import OutOfPages
from headwater.request import Generation, SamplingParams, Span
from headwater.schedule.kinds.answer import FinishedAnswer
from headwater.schedule.kinds.request import Request as Answered
from headwater.schedule.limits import Budget
from headwater.schedule.planner import Planner
from headwater.schedule.sequence import Sequence
from headwater.traces.request import Request, Trace

ENDLESS = Budget(tokens=1 << 60, saves=1 << 60)


class Counted(list[int]):
    """A list of tokens that stores only its length."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count_ = count

    def __len__(self) -> int:
        return self.count_

    def __getitem__(self, at: object) -> int:  # type: ignore[override]
        return 0

    def grow(self, count: int) -> None:
        """Add `count` generated tokens."""
        self.count_ += count


class _FromTrace(Sequence):
    """The first `length` tokens of a recorded request."""

    def __init__(self, id: int, trace: Trace, request: Request, length: int, segments: tuple[Span, ...]) -> None:
        self.trace, self.request, self.length = trace, request, length
        generation = Generation(
            prompt=(),
            params=SamplingParams(max_tokens=request.output_tokens),
            namespace=request.namespace,
            boundaries=request.boundaries,
            keep_output=request.known_tokens > request.prompt_tokens and not request.ended,
            segments=segments,
            fidelity=request.fidelity,
            ended=request.ended,
            priority=request.priority,
        )
        super().__init__(id, generation)

    def __post_init__(self) -> None:
        self.tokens = Counted(self.length)
        self.key = self.exact_key = self.key_until(self.length)

    @property
    def n_prompt(self) -> int:
        return self.length

    @property
    def known_tokens(self) -> int:
        return self.request.known_tokens

    def key_until(self, end: int) -> bytes:
        key = self.trace.key(self.request, end)
        return key if self.marked_from is None else self.marked_key(key, self.marked_from)


class ReplayedAnswer(_FromTrace, FinishedAnswer):
    """Prefill of the recorded answer to a request."""


class Replayed(_FromTrace, Answered):
    """Prompt of a recorded request."""

    def __init__(self, id: int, trace: Trace, request: Request) -> None:
        super().__init__(id, trace, request, request.prompt_tokens, request.segments)

    def prompt_ids(self, span: Span) -> bytes:
        return self.trace.ids(self.request, span)

    def answer(self, id: int, end: int) -> ReplayedAnswer:
        answer = ReplayedAnswer(id, self.trace, self.request, end, ())
        answer.marked_from, answer.whole = self.marked_from, self.whole
        answer.key = answer.key_until(end)
        return answer


class OneByOne:
    """The server's planner and cache without its queue: a prompt's prefill is one leg, its answer's another."""

    def __init__(self, trace: Trace, cache: PrefixCache, planner: Planner) -> None:
        self._trace, self._cache, self._planner = trace, cache, planner
        self.placement = planner.placement
        self.last = 0  # id of the latest sequence

    def serve(self, request: Request) -> CacheAccount | None:
        """Prefill the prompt, and the known part of the answer. Return None if the whole memory is too small."""
        seq = Replayed(self._next_id(), self._trace, request)
        if not prefill(self._planner, self._cache, seq):
            return None
        keeps = self._planner.keeps_answers and seq.generation.keep_output
        end = seq.answer_end(self._cache.layout) if keeps else None
        if end is not None:
            prefill(self._planner, self._cache, seq.answer(self._next_id(), end))
        if request.ended:
            self._planner.end_conversation(seq)
        return seq.account

    def _next_id(self) -> int:
        self.last += 1
        return self.last


def prefill(planner: Planner, cache: PrefixCache, seq: Sequence) -> bool:
    """Prefill a sequence in one leg; return False if the whole memory is too small for it."""
    try:
        plan = planner.first_leg(seq, ENDLESS, ())
    except OutOfPages:
        return False
    assert plan is not None, "an endless budget is large enough for any leg"
    cache.commit(plan)
    cache.release(seq.id)
    return True
