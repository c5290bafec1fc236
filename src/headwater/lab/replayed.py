"""A request of a trace as the scheduler's sequence: it has a key and a length, but no tokens."""

from __future__ import annotations

from headwater.request import Generation, SamplingParams, Span
from headwater.schedule.kinds.answer import FinishedAnswer
from headwater.schedule.kinds.request import Request as Answered
from headwater.schedule.sequence import Sequence
from headwater.traces.request import Request, Trace


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
            keep_output=request.known_tokens > request.prompt_tokens,
            segments=segments,
            fidelity=request.fidelity,
        )
        super().__init__(id, generation)

    def __post_init__(self) -> None:
        self.tokens = Counted(self.length)
        self.key = self.key_until(self.length)

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
    """The prefill of what was answered to a recorded request."""


class Replayed(_FromTrace, Answered):
    """The prompt of a recorded request."""

    def __init__(self, id: int, trace: Trace, request: Request) -> None:
        super().__init__(id, trace, request, request.prompt_tokens, request.segments)

    @property
    def prompt_ids(self) -> bytes:
        return self.trace.ids(self.request, Span(0, self.length))

    @property
    def exact_key(self) -> bytes:
        return self.trace.key(self.request, self.length)

    def segment_ids(self, span: Span) -> bytes:
        return self.trace.ids(self.request, span)

    def answer(self, id: int, end: int) -> ReplayedAnswer:
        answer = ReplayedAnswer(id, self.trace, self.request, end, ())
        answer.marked_from, answer.whole = self.marked_from, self.whole
        answer.key = answer.key_until(end)
        return answer
