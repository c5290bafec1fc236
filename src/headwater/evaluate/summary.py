"""Figures of an evaluation: means over slices of the items, two columns compared item by item, and all of it as JSON.

Intervals are percentile bootstraps (Efron 1979) over groups: items of a group share their documents, so groups are
drawn, not items (Davison and Hinkley 1997, section 3.8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from headwater.evaluate.asking import Scored
from headwater.evaluate.items import KINDS, Item, Json
from headwater.percentile import percentile

RESAMPLES = 2_000
PERCENTS = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over items with its 95% interval, which is None for fewer than two groups."""

    mean: float
    low: float | None
    high: float | None


def estimate(values: Sequence[float], groups: Sequence[int], seed: int = 0) -> Estimate:
    """Estimate the mean of `values`, one an item, whose groups are `groups`. A paired difference is a value, too.

    Equal arguments give equal intervals. Raises ValueError for no values.
    """
    if not values:
        raise ValueError("0 values have no mean")
    _, place_N = np.unique(np.asarray(groups), return_inverse=True)
    sum_G = np.bincount(place_N, weights=np.asarray(values, np.float64))
    count_G = np.bincount(place_N)
    mean, n_groups = float(sum_G.sum() / count_G.sum()), len(count_G)
    if n_groups < 2:
        return Estimate(mean, None, None)
    drawn_BG = np.random.default_rng(seed).integers(n_groups, size=(RESAMPLES, n_groups))
    means = sorted((sum_G[drawn_BG].sum(1) / count_G[drawn_BG].sum(1)).tolist())
    low, high = (percentile(means, percent) for percent in PERCENTS)
    return Estimate(mean, low, high)


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of some items of one column."""

    items: int
    groups: int
    exact: Estimate
    f1: Estimate | None  # of items without tool calls
    well_formed: Estimate | None  # of the tool calls
    failed: int  # refused, or an error; they count as wrong
    prompt_tokens: int
    cached_tokens: int | None  # None: the server does not report them

    @classmethod
    def of(cls, scored: Sequence[Scored], seed: int) -> Summary:
        exact = _estimate(scored, lambda one: one.score.exact, seed)
        assert exact is not None, "a summary needs at least one item"
        return cls(
            items=len(scored),
            groups=len({one.item.group for one in scored}),
            exact=exact,
            f1=_estimate(scored, lambda one: one.score.f1, seed),
            well_formed=_estimate(scored, lambda one: one.score.well_formed, seed),
            failed=sum(not one.answer.ok for one in scored),
            prompt_tokens=sum(one.answer.prompt_tokens or 0 for one in scored),
            cached_tokens=_sum(one.answer.cached_tokens for one in scored),
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """A column compared with another, item by item."""

    items: int  # that were answered in at least one of the columns
    equal: int  # with the same answer, to the letter
    same_bits: int | None  # equal ones with equal log probabilities; None: not reported
    difference: Estimate  # of exact match: this column less the other
    prompt_tokens: int
    saved_tokens: int | None  # cached tokens of this column less those of the other

    @classmethod
    def of(cls, these: Sequence[Scored], others: Sequence[Scored], seed: int) -> Comparison:
        pairs = list(zip(these, others, strict=True))
        answered = [(this, other) for this, other in pairs if this.answer.ok or other.answer.ok]
        equal = [(this, other) for this, other in answered if this.answer.visible == other.answer.visible]
        reported = all(one.answer.logprobs is not None for one in (*these, *others) if one.answer.ok)
        cached, before = (_sum(one.answer.cached_tokens for one in column) for column in (these, others))
        return cls(
            items=len(answered),
            equal=len(equal),
            same_bits=sum(a.answer.logprobs == b.answer.logprobs for a, b in equal) if reported else None,
            difference=estimate(
                [this.score.exact - other.score.exact for this, other in pairs],
                [this.item.group for this, _ in pairs],
                seed,
            ),
            prompt_tokens=sum(one.answer.prompt_tokens or 0 for one in these),
            saved_tokens=None if cached is None or before is None else cached - before,
        )


def about_tokens(item: Item) -> int:
    """Return the power of two nearest to the length of the context, as a ratio."""
    return 1 << round(math.log2(item.tokens))


def most_documents(item: Item) -> int:
    """Return the smallest power of two that is at least the number of documents; 0 for none."""
    return 1 << (item.n_documents - 1).bit_length() if item.n_documents else 0


SLICES: dict[str, Callable[[Item], str | int]] = {
    "kind": lambda item: item.kind,
    "documents": most_documents,
    "context": about_tokens,
}
Sliced = dict[str, dict[str | int, Summary]]


def sliced(scored: Sequence[Scored], seed: int) -> Sliced:
    """Summarise a column by each slice and its values in order; "all" holds the whole column."""
    found: Sliced = {"all": {"": Summary.of(scored, seed)}}
    for name, key in SLICES.items():
        found[name] = {value: Summary.of(members, seed) for value, members in split(scored, key).items()}
    return found


def split(scored: Sequence[Scored], key: Callable[[Item], str | int]) -> dict[str | int, list[Scored]]:
    """Group a column by a key of its items: kinds in the order of KINDS, numbers ascending."""

    def place(value: str | int) -> int:
        return KINDS.index(value) if isinstance(value, str) else value

    values = sorted({key(one.item) for one in scored}, key=place)
    return {value: [one for one in scored if key(one.item) == value] for value in values}


def _estimate(scored: Iterable[Scored], value: Callable[[Scored], float | None], seed: int) -> Estimate | None:
    pairs = [(found, one.item.group) for one in scored if (found := value(one)) is not None]
    return estimate([value for value, _ in pairs], [group for _, group in pairs], seed) if pairs else None


def _sum(values: Iterable[int | None]) -> int | None:
    reported = [value for value in values if value is not None]
    return sum(reported) if reported else None


def as_json(
    columns: Mapping[str, Sequence[Scored]], slices: Mapping[str, Sliced], comparisons: Mapping[str, Comparison]
) -> Json:
    """Return every figure of the tables, and a row for each answer."""
    return {
        "columns": {
            name: {
                by: [{"value": value, **asdict(summary)} for value, summary in rows.items()]
                for by, rows in found.items()
            }
            for name, found in slices.items()
        },
        "comparisons": {name: asdict(one) for name, one in comparisons.items()},
        "rows": [_row(one) for column in columns.values() for one in column],
    }


def _row(one: Scored) -> Json:
    """Return an answer and the right one. Log probabilities are omitted: they are many, and already compared."""
    item = one.item
    answer = {name: value for name, value in asdict(one.answer).items() if name != "logprobs"}
    asked = {name: getattr(item, name) for name in ("kind", "n_documents", "tokens", "group", "answers")}
    right = None if item.call is None else {"name": item.call.name, "arguments": dict(item.call.arguments)}
    return {**answer, **asked, "call": right, **asdict(one.score)}
