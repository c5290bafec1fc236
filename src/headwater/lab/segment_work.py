"""What steps do for segments: which tokens they make, compose and compute at seams, and the FLOPs of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.plan import Plan, PrefillFlops
from headwater.schedule.step import Step


@dataclass(frozen=True, slots=True)
class Saved:
    """What one request owes to segments."""

    seam_tokens: int = 0  # of them, what was computed anew
    flops: float = 0.0  # of their interiors, where they stood


@dataclass(slots=True)
class SegmentWork:
    """Sums over all steps so far. FLOPs are a plain prefill's: what transitions and composing add is left out."""

    flops: PrefillFlops
    made_tokens: int = 0
    made_flops: float = 0.0
    _saved: dict[int, Saved] = field(default_factory=dict)

    def note(self, step: Step) -> None:
        """Call between a step's plan and its end."""
        for leg in step.legs:
            plan, composition = leg.plan, leg.seq.composition
            if plan.making is not None:
                self.made_tokens += plan.computed_tokens
                self.made_flops += self.flops.between(plan.start, plan.end)
            elif plan.composed and composition is not None:
                tokens = sum(span.end - span.start for span in composition.spans)
                self._saved[leg.seq.id] = Saved(tokens - composition.interiors, self._composed(plan))

    def of(self, request: int) -> Saved:
        """Of a request whose prompt is computed; it is asked once."""
        return self._saved.pop(request, Saved())

    def _composed(self, plan: Plan) -> float:
        return sum(self.flops.between(part.at + part.start, part.at + part.end) for part in plan.composed)
