"""Draws examples of all kinds."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from training.tasks import memory, pairs, persona, recall, tools
from training.tasks.budget import Count, estimate, estimate_prose
from training.tasks.example import ABSENT, KINDS, MEMORY, PAIRS, PERSONA, RECALL, SINGLE, TEXT, TOOL, TWO_HOP, Example
from training.tasks.split import SPLITS
from training.tasks.text import Passages, fallback

FEWEST_TOKENS = 192  # below, no set of documents with a question fits
WEIGHTS = {SINGLE: 0.42, TWO_HOP: 0.18, ABSENT: 0.1, MEMORY: 0.09, PERSONA: 0.05, TOOL: 0.08, TEXT: 0.08}
UNWEIGHTED = 0.1  # of a kind that is drawn only when it is asked for
OTHERS: dict[str, Callable[[random.Random, int, str, Count], Example]] = {
    MEMORY: memory.draw,
    PAIRS: pairs.draw,
    PERSONA: persona.draw,
    TOOL: tools.draw,
}


def draw(
    rng: random.Random,
    tokens: int,
    split: str,
    kinds: Sequence[str] | Mapping[str, float] | None = None,
    *,
    count: Count | None = None,
    texts: Passages | None = None,
) -> Example:
    """An example of at most `tokens` tokens; the same state of `rng` gives the same one.

    `kinds`: those to draw from, or the weight of each. Questions about one set of documents are of all the kinds that
    are asked of documents. `count` tells how many tokens a text has; without it they
    are estimated. `texts`: where plain text comes from.
    """
    weights = _weights(kinds)
    if tokens < FEWEST_TOKENS:
        raise ValueError(f"an example is to have {tokens} tokens, it needs {FEWEST_TOKENS}")
    if split not in SPLITS:
        raise ValueError(f"the split is {split!r}, there are {' and '.join(SPLITS)}")
    kind = rng.choices(list(weights), list(weights.values()))[0]
    if kind == TEXT:
        return (texts or fallback()).draw(rng, tokens, split, count or estimate_prose)
    if kind in OTHERS:
        return OTHERS[kind](rng, tokens, split, count or estimate)
    return recall.draw(rng, tokens, split, {k: w for k, w in weights.items() if k in RECALL}, count or estimate)


def _weights(kinds: Sequence[str] | Mapping[str, float] | None) -> Mapping[str, float]:
    if kinds is None:
        return WEIGHTS
    unknown = set(kinds) - set(KINDS)
    if unknown or not kinds:
        raise ValueError(f"kinds are {list(kinds)}, there are {', '.join(KINDS)}")
    return kinds if isinstance(kinds, Mapping) else {kind: WEIGHTS.get(kind, UNWEIGHTED) for kind in kinds}
