"""An evaluation as JSON: every figure of the tables, and a row for each answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from headwater.evaluate.asking import Scored
from headwater.evaluate.summary import Comparison, Sliced
from headwater.evaluate.text import Perplexity

Json = dict[str, Any]


def evaluation(
    columns: Mapping[str, Sequence[Scored]], slices: Mapping[str, Sliced], comparisons: Mapping[str, Comparison]
) -> Json:
    return {
        "columns": {name: _sliced(found) for name, found in slices.items()},
        "comparisons": {name: asdict(one) for name, one in comparisons.items()},
        "rows": [row(one) for column in columns.values() for one in column],
    }


def perplexities(found: Mapping[str, Perplexity]) -> Json:
    return {
        url: {**asdict(one), "per_token": one.per_token, "bits_per_byte": one.bits_per_byte}
        for url, one in found.items()
    }


def _sliced(slices: Sliced) -> Json:
    return {
        name: [{"value": value, **asdict(summary)} for value, summary in rows.items()] for name, rows in slices.items()
    }


def row(one: Scored) -> Json:
    """An answer beside what it was to be. Log probabilities are left out: they are compared, and many."""
    item = one.item
    answered = {name: value for name, value in asdict(one.answered).items() if name != "logprobs"}
    asked = {name: getattr(item, name) for name in ("kind", "n_documents", "tokens", "group", "answers")}
    right = None if item.call is None else {"name": item.call.name, "arguments": dict(item.call.arguments)}
    return {**answered, **asked, "call": right, **asdict(one.score)}
