"""Passes of the models that draft: the tokens that they find, and their seconds."""

from __future__ import annotations

from torch import Tensor

FORGETS = 0.9  # weight of earlier passes with each new one


def best_of(logits_SV: Tensor) -> list[tuple[int, float]]:
    """Return the likeliest token of each row, and its probability."""
    best_S, token_S = logits_SV.max(dim=-1)
    probability_S = (best_S - logits_SV.logsumexp(dim=-1)).exp()
    return list(zip(token_S.tolist(), probability_S.tolist(), strict=True))


class PassSeconds:
    """Seconds of a pass that drafts. A shorter one counts at once: the first ones fetch memory, and few may follow."""

    def __init__(self) -> None:
        self.mean = 0.0

    def note(self, seconds: float) -> None:
        """Add a pass."""
        slower = 0 < self.mean < seconds
        self.mean = FORGETS * self.mean + (1 - FORGETS) * seconds if slower else seconds
