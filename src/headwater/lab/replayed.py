"""A request of a trace as the scheduler takes it: it knows its key and how long it is, and needs no tokens."""

from __future__ import annotations

from headwater.cache.segments.compose import marked
from headwater.request import Generation, SamplingParams, Span
from headwater.schedule.sequence import Sequence
from headwater.traces.request import Request, Trace


class Counted(list[int]):
    """Tokens of which only the number matters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count_ = count

    def __len__(self) -> int:
        return self.count_

    def __getitem__(self, at: object) -> int:  # type: ignore[override]
        return 0

    def grow(self, count: int) -> None:
        """So many tokens were generated."""
        self.count_ += count


class Replayed(Sequence):
    """A prompt of a trace, or the prefill of what was answered to it."""

    def __init__(self, id: int, trace: Trace, request: Request, answer_until: int | None = None) -> None:
        self.trace, self.request = trace, request
        self._n_prompt = request.prompt_tokens if answer_until is None else answer_until
        generation = Generation(
            prompt=(),
            params=SamplingParams(max_tokens=request.output_tokens),
            namespace=request.namespace,
            boundaries=request.boundaries,
            keep_output=request.known_tokens > request.prompt_tokens,
            segments=request.segments if answer_until is None else (),
            fidelity=request.fidelity,
        )
        super().__init__(id, generation, samples=answer_until is None)

    def __post_init__(self) -> None:
        self.tokens = Counted(self._n_prompt)
        self.key = self.key_until(self._n_prompt)

    @property
    def n_prompt(self) -> int:
        return self._n_prompt

    @property
    def known_tokens(self) -> int:
        return self.request.known_tokens

    @property
    def prompt_ids(self) -> bytes:
        return self.trace.ids(self.request, Span(0, self._n_prompt))

    @property
    def exact_key(self) -> bytes:
        return self.trace.key(self.request, self._n_prompt)

    def segment_ids(self, span: Span) -> bytes:
        return self.trace.ids(self.request, span)

    def key_until(self, end: int) -> bytes:
        key = self.trace.key(self.request, end)
        return (
            key
            if self.marked_from is None
            else marked(key, self.marked_from, self.generation.fidelity, self.anew or ())
        )

    def answer(self, id: int, end: int) -> Replayed:
        answer = Replayed(id, self.trace, self.request, end)
        answer.marked_from, answer.anew = self.marked_from, self.anew
        answer.key = answer.key_until(end)
        return answer
