"""Samples of a trace by groups of sessions, and hit rates estimated from them."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.plan import CacheLayout
from headwater.schedule.planner import common_tokens
from headwater.traces.request import Request

COMMON = 4  # a prefix of one session in 4 or more is common, and forms no group


def groups(requests: Sequence[Request], layout: CacheLayout, most: int) -> list[int]:
    """Return the group number of each request: sessions that share a prefix form a group.

    A prefix that more than `most` sessions have, or one in 4 of all, forms none: every sample has it.
    """
    texts = sorted({(r.namespace, r.text, r.session) for r in requests if len(r.text) >= layout.unit_bytes})
    limit = min(most, len({request.session for request in requests}) // COMMON)
    union = _Union()
    shares: list[tuple[int, set[str]]] = []  # prefixes of the current text: tokens, and sessions so far
    for (space, text, session), after in zip(texts, [*texts[1:], None], strict=True):
        same = after is not None and after[0] == space
        shared = common_tokens(text, after[1], layout) if same and after is not None else 0
        sessions = {session}
        while shares and shares[-1][0] > shared:
            sessions |= shares.pop()[1]
            if len(sessions) <= limit:
                union.unite(sessions)
        if shared and shares and shares[-1][0] == shared:
            shares[-1][1].update(sessions)
        elif shared:
            shares.append((shared, sessions))
    numbers: dict[str, int] = {}
    return [numbers.setdefault(union.first(request.session), len(numbers)) for request in requests]


def parts(group_of: Sequence[int], count: int, seed: int) -> list[int]:
    """Return for each request's group one of `count` parts. Groups are numbered in the order in which they begin."""
    rng = random.Random(f"parts {count} {seed}")
    of_group: list[int] = []
    while len(of_group) <= max(group_of):
        of_group += rng.sample(range(count), count)
    return [of_group[group] for group in group_of]


class _Union:
    """Disjoint sets of sessions."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def first(self, session: str) -> str:
        """Return the session that represents the set."""
        while (above := self._above.get(session, session)) != session:
            self._above[session] = self._above.get(above, above)
            session = above
        return session

    def unite(self, sessions: set[str]) -> None:
        first, *rest = sorted(self.first(session) for session in sessions)
        for other in rest:
            self._above[other] = first


# Student's t of 1 degree of freedom and more, two-sided 95%; beyond, 1.96 + 2.4 / degrees is within 2%.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Result of one sample at one size, in tokens."""

    prompt: int
    hit: int  # by the cache
    modelled: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated hit rate at one size."""

    hit_rate: float
    error: float  # half the 95% interval
    correction: float  # what the samples added to the model


def estimate(modelled: float, samples: Sequence[Sampled], parts: int) -> Estimate:
    """Estimate a ratio from samples of unequal length out of `parts` (Cochran, Sampling Techniques, chapter 6)."""
    prompts = sum(one.prompt for one in samples)
    correction = sum(one.hit - one.modelled for one in samples) / max(1, prompts)
    left = [one.hit - one.modelled - correction * one.prompt for one in samples]
    mean = max(1.0, statistics.fmean(one.prompt for one in samples))
    spread = math.sqrt(sum(value**2 for value in left) / (len(left) - 1) / len(left)) / mean
    unseen = max(0.0, 1 - len(samples) / parts)
    hit_rate = min(1.0, max(0.0, modelled + correction))
    return Estimate(hit_rate, student(len(left) - 1) * spread * math.sqrt(unseen), correction)


def student(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t."""
    return T[degrees - 1] if degrees <= len(T) else 1.96 + 2.4 / degrees
