"""What of a prompt is computed and what is composed."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.cache.segments.compose import Widths, usable
from headwater.cache.segments.method import METHODS, relevant
from headwater.evaluate.fidelity.prompt import Prompt
from headwater.request import Fidelity, Span


@dataclass(frozen=True, slots=True)
class Recipe:
    """For one prompt: every segment but some is composed, with seams of the same widths."""

    widths: Widths
    carries: bool = True  # whether transitions are applied
    whole: frozenset[int] = frozenset()  # the segments, by their number, of which nothing is reused

    @classmethod
    def of(cls, fidelity: Fidelity, conv_taps: int, prompt: Prompt) -> Recipe:
        """As the server composes this prompt."""
        method, spans = METHODS[fidelity], prompt.segments
        anew = relevant(prompt.key, spans, method.whole_of(len(spans)))
        whole = frozenset(i for i, span in enumerate(spans) if span in anew)
        return cls(method.widths(conv_taps), method.carries, whole)

    def composed(self, prompt: Prompt) -> tuple[Span, ...]:
        """The segments that are reused; one at the prompt's end, and one without an interior, never is."""
        spans = (span for i, span in enumerate(prompt.segments) if i not in self.whole)
        return usable(spans, self.widths, 0, len(prompt.tokens) - 1)
