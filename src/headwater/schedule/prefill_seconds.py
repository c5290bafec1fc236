"""Seconds of a prefill by its tokens, as measured: a line that steps of few tokens do not tilt."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median_low

from headwater.plan import PrefillFlops

RECENT = 9  # steps of each kind that count
LONG = 4  # the longest step has at most that many times the work of one that says what a token takes
SHORT = 16  # and at least that many times that of one that says what a step takes beside its tokens
ALIKE = PrefillFlops()  # of tokens without attention


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """Expected seconds of a prefill: those of steps of `full` tokens, and more a token if it has fewer."""

    step: float  # beside its tokens, if it has few
    token: float  # of each in full steps, without what attention reads
    square: float = 0.0  # of attention, times the difference of the squares of the end and the start
    full: float = 1.0  # tokens

    def between(self, start: float, end: float) -> float:
        """Return the seconds of tokens [start, end) of a prompt, beside others in the same steps."""
        return (end - start) * (self.token + self.square * (end + start))

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds of a prefill of tokens [start, end). With more tokens they are never fewer."""
        return self.between(start, end) + self.step * max(0.0, 1 - (end - start) / self.full)


class PrefillSeconds:
    """Measured seconds of steps that prefill.

    A step's seconds have a part that does not depend on its tokens: weights are read, kernels are started, and answers
    are decoded in it. So seconds a token are those of long steps alone, with at least a quarter of the work of the
    longest one so far, and include their share of that part. It is what short steps take beyond their tokens. Both are
    lower medians of recent steps: another process makes a step longer, and never shorter.

    Work is counted in FLOPs: attention makes the tokens of a long prompt slower, also if a worker computes as fast.
    """

    def __init__(self, flops: PrefillFlops = ALIKE) -> None:
        """`flops`: of the model; by default all tokens are alike."""
        self.speed: PrefillSpeed | None = None  # None before any step
        self._flops = flops
        self._longest = 0.0  # work
        self._long: deque[tuple[float, float]] = deque(maxlen=RECENT)  # work, seconds
        self._short: deque[tuple[float, float]] = deque(maxlen=RECENT)

    def note(self, flops: float, seconds: float) -> None:
        """Add a step that computed so many FLOPs of prompts, more than 0."""
        if flops > self._longest:
            self._longest = flops
            steps, self._long = (*self._short, *self._long), deque(maxlen=RECENT)
            self._short.clear()
            for step in steps:
                self._sort_in(*step)
        self._sort_in(flops, seconds)
        rates = sorted((seconds / work, work) for work, seconds in self._long)
        a_flop, full = rates[(len(rates) - 1) // 2]
        beside = median_low(seconds - a_flop * work for work, seconds in self._short) if self._short else 0.0
        linear, quadratic = self._flops.linear, self._flops.quadratic
        beside = min(max(0.0, beside), a_flop * full)
        self.speed = PrefillSpeed(beside, a_flop * linear, a_flop * quadratic, full / linear)

    def _sort_in(self, flops: float, seconds: float) -> None:
        if flops * LONG >= self._longest:
            self._long.append((flops, seconds))
        elif flops * SHORT <= self._longest:
            self._short.append((flops, seconds))
