"""Tables of an evaluation, for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from headwater.evaluate.asking import Scored
from headwater.evaluate.divergence import Divergence
from headwater.evaluate.perplexity import Perplexity
from headwater.evaluate.summary import SLICES, Comparison, Estimate, Sliced, Summary, split
from headwater.table import Table

NONE = "–"
MAX_FAULTS = 5  # messages of a table


def sliced_table(title: str, slices: Sliced) -> Table:
    """Return a row for each slice, with the slice's name in the first column."""
    names = ("items", "exact match %", "token F1 %", "well-formed %", "tokens", "cached", "failed")
    table = Table(title, ("", ""), names)
    for name, rows in slices.items():
        for place, (value, summary) in enumerate(rows.items()):
            table.add_row("" if place else name, _named(name, value), *_figures(summary))
        table.add_section()
    return table


def kinds_by_context(scored: Sequence[Scored], seed: int) -> Table:
    """Return exact match with a row for each length and a column for each kind."""
    kinds = list(split(scored, SLICES["kind"]))
    table = Table("exact match %", ("context",), [str(kind) for kind in kinds])
    for length, members in split(scored, SLICES["context"]).items():
        cells = split(members, SLICES["kind"])
        shown = [_percent(Summary.of(cells[kind], seed).exact) if kind in cells else NONE for kind in kinds]
        table.add_row(_named("context", length), *shown)
    return table


def comparison_table(first: str, comparisons: Mapping[str, Comparison]) -> Table:
    """Return a row for each column that was compared with the first."""
    names = ("equal answers", "equal log probs", "exact match: difference", "tokens", "saved")
    table = Table(f"item by item, against {first}", ("",), names)
    for name, one in comparisons.items():
        bits = "not reported" if one.same_bits is None else f"{one.same_bits:,} of {one.items:,}"
        table.add_row(
            name,
            f"{one.equal:,} of {one.items:,}",
            bits,
            _percent(one.difference, signed=True),
            f"{one.prompt_tokens:,}",
            _share(one.saved_tokens, one.prompt_tokens),
        )
    return table


def perplexity_table(window: int, found: Mapping[str, Perplexity]) -> Table:
    """Return a row for each server."""
    names = ("perplexity", "bits a byte", "tokens", "bytes")
    table = Table(f"perplexity, in windows of {window:,} tokens", ("",), names)
    for name, one in found.items():
        table.add_row(name, f"{one.per_token:,.3f}", f"{one.bits_per_byte:.4f}", f"{one.tokens:,}", f"{one.bytes:,}")
    return table


def divergence_table(other: str, found: Divergence) -> Table:
    """Return one row, in nats."""
    names = ("positions", "mean", "p50", "p99", "max", "same first token", "failed")
    table = Table(f"divergence from {other}, nats", (), names)
    mean = f"{found.mean.mean:.3g}"
    if found.mean.low is not None:
        mean += f" [{found.mean.low:.3g},{found.mean.high:.3g}]"
    same, failed = f"{found.same_first / found.positions:.1%}", sum(found.failed.values())
    numbers = [f"{value:.3g}" for value in (found.p50, found.p99, found.max)]
    table.add_row(f"{found.positions:,}", mean, *numbers, same, f"{failed:,}" if failed else NONE)
    return table


def faults(scored: Sequence[Scored]) -> list[str]:
    """List refusals and errors by their number, the most frequent first."""
    counts = Counter(f"{one.answer.outcome}: {one.answer.detail}" for one in scored if not one.answer.ok)
    return [f"{count:,} x {message}" for message, count in counts.most_common(MAX_FAULTS)]


def _named(slice_name: str, value: str | int) -> str:
    if slice_name == "context":
        return f"about {value:,}"
    if slice_name == "documents" and isinstance(value, int) and value > 2:
        return f"{value // 2 + 1} to {value}"
    return str(value)


def _figures(summary: Summary) -> list[str]:
    return [
        f"{summary.items:,}",
        _percent(summary.exact),
        _percent(summary.f1),
        _percent(summary.well_formed),
        f"{summary.prompt_tokens:,}",
        _share(summary.cached_tokens, summary.prompt_tokens),
        f"{summary.failed:,}" if summary.failed else NONE,
    ]


def _percent(one: Estimate | None, signed: bool = False) -> str:
    if one is None:
        return NONE
    sign = "+" if signed else ""
    mean = f"{100 * one.mean:{sign}.1f}"
    return mean if one.low is None or one.high is None else f"{mean} [{100 * one.low:.1f},{100 * one.high:.1f}]"


def _share(part: int | None, whole: int) -> str:
    if part is None:
        return "not reported"
    return f"{part:,} ({part / whole:.0%})" if whole else f"{part:,}"
