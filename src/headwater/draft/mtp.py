"""Drafts of the model's own head of multi-token prediction, which are computed between its steps.

Cost of a proposal: the head computes a row a draft, and one for each token that the sequence has got since.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.draft.drafter import NO_DRAFT, Draft, Source

MTP_DRAFTS = 4  # tokens of a head's draft
SUREST = 64  # what `agreed` counts at most


def draft_of(tokens: Sequence[int], first_chance: float) -> Draft:
    """Return a head's draft, whose first token it gives the probability `first_chance`.

    That counts as if about 2 / (1 − p) tokens agreed.
    """
    if not tokens:
        return NO_DRAFT
    return Draft(list(tokens), min(SUREST, int(2 / max(1e-9, 1 - first_chance))), Source.HEAD)
