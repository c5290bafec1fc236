"""Reasons why requests did not resume deeper: prompts, and tokens that were computed, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from headwater.account import Reason
from headwater.lab.report.blocks import Empty, Figures, Legend, Pairs, Piece, Section
from headwater.lab.report.line import Lines
from headwater.lab.report.numbers import count, percent
from headwater.lab.row import Result
from headwater.lab.tally import TOO_LARGE

MEANING = {
    Reason.FULL: "all but the last page was cached: no miss",
    Reason.DIVERGED: "the prompt leaves what is cached there",
    Reason.COLD: "nothing in its namespace begins like it",
    Reason.OTHER_NAMESPACE: "its namespace holds nothing, others do",
    Reason.NO_CHECKPOINT: "KV is cached deeper, but no state was kept there",
    Reason.EVICTED: "a deeper match was evicted",
    Reason.NO_MEMORY: "a match could not be held beside the request",
    Reason.TOO_SHORT: "the prompt has no full page before its last token",
    Reason.CACHE_OFF: "there is no cache",
    TOO_LARGE: "no memory could have held the request: it was refused",
}
WHAT = "tokens not hit"


def reasons(results: Sequence[Result], lines: Lines) -> Section:
    """Return two stacked bars for each row, and their figures."""
    ran = [result for result in results if result.row.requests]
    title, about = "Why not deeper", "what kept requests from resuming further on"
    if not ran:
        return Section("reasons", title, about, [Empty("No request was replayed.")])
    names = [name for name in MEANING if any(name in result.row.misses_by_reason for result in ran)]
    names += sorted({name for result in ran for name in result.row.misses_by_reason} - set(MEANING))
    legend = Legend([("i", f"key {name}", _words(name), MEANING.get(name, "")) for name in names])
    counted = [(lines.title(one.row), one.row.misses_by_reason, _missed_tokens(one)) for one in ran]
    bars = [(row, (_bar(prompts, names, "prompts"), _bar(missed, names, WHAT))) for row, prompts, missed in counted]
    rows = [[row, *(_both(prompts, missed, name) for name in names)] for row, prompts, missed in counted]
    figures = Figures([f"Prompts / {WHAT}", *map(_words, names)], rows)
    return Section("reasons", title, about, [legend, Pairs(["Prompts", WHAT.capitalize()], bars), figures])


def _missed_tokens(result: Result) -> Counter[str]:
    missed: Counter[str] = Counter()
    for one in result.outcomes:
        missed[one.reason] += one.prompt_tokens - one.hit_tokens
    return missed


def _bar(counts: Mapping[str, int], names: Sequence[str], what: str) -> tuple[str, list[Piece]]:
    """Return the bar's label and its pieces."""
    total = sum(counts.values())
    if not total:
        return f"no {what}", []
    present = [name for name in names if counts.get(name)]
    told = ", ".join(f"{_words(name)} {percent(counts[name] / total)}" for name in present)
    return f"{what}: {told}", [_piece(name, counts[name], total, what) for name in present]


def _piece(name: str, number: int, total: int, what: str) -> Piece:
    share = number / total
    tip = f"{_words(name)} {percent(share)}\n{count(number)} of {count(total)} {what}"
    return Piece(name, _words(name), max(1, 10_000 * number // total), percent(share, 0), tip)


def _both(prompts: Mapping[str, int], tokens: Mapping[str, int], name: str) -> str:
    return f"{count(prompts.get(name, 0))} / {count(tokens.get(name, 0))}"


def _words(name: str) -> str:
    return name.replace("_", " ")
