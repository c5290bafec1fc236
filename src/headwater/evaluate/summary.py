"""What scored answers come to: figures of a slice of them, and of two columns item by item."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headwater.evaluate.asking import Scored
from headwater.evaluate.bootstrap import Estimate, estimate
from headwater.evaluate.item import KINDS, Item


@dataclass(frozen=True, slots=True)
class Summary:
    """Of some items under one column."""

    items: int
    groups: int
    exact: Estimate
    f1: Estimate | None  # of those that are no tool calls
    well_formed: Estimate | None  # of those that are
    failed: int  # refused, or an error; they count as wrong
    prompt_tokens: int
    cached_tokens: int | None  # None: the server does not tell

    @classmethod
    def of(cls, scored: Sequence[Scored], seed: int) -> Summary:
        exact = _estimate(scored, lambda one: one.score.exact, seed)
        assert exact is not None, "of no items there is no summary"
        return cls(
            items=len(scored),
            groups=len({one.item.group for one in scored}),
            exact=exact,
            f1=_estimate(scored, lambda one: one.score.f1, seed),
            well_formed=_estimate(scored, lambda one: one.score.well_formed, seed),
            failed=sum(not one.answered.ok for one in scored),
            prompt_tokens=sum(one.answered.prompt_tokens or 0 for one in scored),
            cached_tokens=_sum(one.answered.cached_tokens for one in scored),
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of a column with another, item by item."""

    items: int  # that were answered in one of them at least
    equal: int  # the same answer, to the letter
    same_bits: int | None  # of the equal ones those with equal log probabilities; None: not told
    difference: Estimate  # of exact match: this column less the other
    prompt_tokens: int
    saved_tokens: int | None  # cached here less cached there

    @classmethod
    def of(cls, these: Sequence[Scored], others: Sequence[Scored], seed: int) -> Comparison:
        pairs = list(zip(these, others, strict=True))
        answered = [(this, other) for this, other in pairs if this.answered.ok or other.answered.ok]
        equal = [(this, other) for this, other in answered if this.answered.said == other.answered.said]
        told = all(one.answered.logprobs is not None for one in (*these, *others) if one.answered.ok)
        cached, before = (_sum(one.answered.cached_tokens for one in column) for column in (these, others))
        return cls(
            items=len(answered),
            equal=len(equal),
            same_bits=sum(a.answered.logprobs == b.answered.logprobs for a, b in equal) if told else None,
            difference=estimate(
                [this.score.exact - other.score.exact for this, other in pairs],
                [this.item.group for this, _ in pairs],
                seed,
            ),
            prompt_tokens=sum(one.answered.prompt_tokens or 0 for one in these),
            saved_tokens=None if cached is None or before is None else cached - before,
        )


def about_tokens(item: Item) -> int:
    """The power of two that its context's length is nearest to, as a ratio."""
    return 1 << round(math.log2(item.tokens))


def most_documents(item: Item) -> int:
    """The power of two that they are at most, more than half of it; 0 for none."""
    return 1 << (item.n_documents - 1).bit_length() if item.n_documents else 0


SLICES: dict[str, Callable[[Item], str | int]] = {
    "kind": lambda item: item.kind,
    "documents": most_documents,
    "context": about_tokens,
}
Sliced = dict[str, dict[str | int, Summary]]


def sliced(scored: Sequence[Scored], seed: int) -> Sliced:
    """By the name of a slice, then its value in order; under "all" everything together."""
    found: Sliced = {"all": {"": Summary.of(scored, seed)}}
    for name, key in SLICES.items():
        found[name] = {value: Summary.of(members, seed) for value, members in split(scored, key).items()}
    return found


def split(scored: Sequence[Scored], key: Callable[[Item], str | int]) -> dict[str | int, list[Scored]]:
    """Kinds in the order that they are listed in, numbers ascending."""
    values = sorted({key(one.item) for one in scored}, key=_place)
    return {value: [one for one in scored if key(one.item) == value] for value in values}


def _place(value: str | int) -> int:
    return KINDS.index(value) if isinstance(value, str) else value


def _estimate(scored: Iterable[Scored], value: Callable[[Scored], float | None], seed: int) -> Estimate | None:
    pairs = [(found, one.item.group) for one in scored if (found := value(one)) is not None]
    return estimate([value for value, _ in pairs], [group for _, group in pairs], seed) if pairs else None


def _sum(values: Iterable[int | None]) -> int | None:
    told = [value for value in values if value is not None]
    return sum(told) if told else None
