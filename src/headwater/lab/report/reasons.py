"""Why requests did not resume deeper: prompts, and tokens that were computed, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from headwater.account import Reason
from headwater.lab.report.line import Lines
from headwater.lab.report.markup import Markup, tag
from headwater.lab.report.numbers import count, percent
from headwater.lab.report.section import empty, figures, section
from headwater.lab.row import Result
from headwater.lab.tally import TOO_LARGE

MEANING = {
    Reason.FULL: "all but the last page was cached: no miss",
    Reason.DIVERGED: "the prompt leaves what is cached there",
    Reason.COLD: "nothing in its namespace begins like it",
    Reason.OTHER_NAMESPACE: "its namespace holds nothing, others do",
    Reason.NO_CHECKPOINT: "KV is cached deeper, but no state was kept there",
    Reason.EVICTED: "what would have matched deeper was given up for memory",
    Reason.NO_MEMORY: "a match could not be held beside the request",
    Reason.TOO_SHORT: "the prompt has no full page before its last token",
    Reason.CACHE_OFF: "there is no cache",
    TOO_LARGE: "no memory could have held the request: it was refused",
}


def reasons(results: Sequence[Result], lines: Lines) -> Markup:
    """Two bars for each row."""
    ran = [result for result in results if result.row.requests]
    title, about = "Why not deeper", "what kept requests from resuming further on"
    if not ran:
        return section("reasons", title, about, empty("No request was replayed."))
    missed = [_missed_tokens(result) for result in ran]
    names = [name for name in MEANING if any(name in result.row.misses_by_reason for result in ran)]
    names += sorted({name for result in ran for name in result.row.misses_by_reason} - set(MEANING))
    keys = [
        tag("li", tag("i", class_=f"key {name}"), tag("span", tag("b", _words(name)), ": ", MEANING.get(name, "")))
        for name in names
    ]
    bars = [
        tag(
            "div",
            tag("span", lines.title(result.row), class_="name"),
            _bar(result.row.misses_by_reason, names, "prompts"),
            _bar(tokens, names, "tokens not hit"),
        )
        for result, tokens in zip(ran, missed, strict=True)
    ]
    head = tag("div", tag("span", class_="name"), tag("h3", "Prompts"), tag("h3", "Tokens not hit"), class_="head")
    rows = [
        [lines.title(result.row), *(_both(result.row.misses_by_reason, tokens, name) for name in names)]
        for result, tokens in zip(ran, missed, strict=True)
    ]
    data = figures(["Prompts / tokens not hit", *map(_words, names)], rows)
    return section(
        "reasons", title, about, tag("ul", keys, class_="legend"), tag("div", head, *bars, class_="pairs"), data
    )


def _missed_tokens(result: Result) -> Counter[str]:
    missed: Counter[str] = Counter()
    for one in result.outcomes:
        missed[one.reason] += one.prompt_tokens - one.hit_tokens
    return missed


def _bar(counts: Mapping[str, int], names: Sequence[str], what: str) -> Markup:
    total = sum(counts.values())
    if not total:
        return tag("div", class_="stack", role="img", aria_label=f"no {what}")
    present = [name for name in names if counts.get(name)]
    told = ", ".join(f"{_words(name)} {percent(counts[name] / total)}" for name in present)
    parts = (_part(name, counts[name], total, what) for name in present)
    return tag("div", parts, class_="stack", role="img", aria_label=f"{what}: {told}")


def _part(name: str, number: int, total: int, what: str) -> Markup:
    """It says its reason where there is room for that, and its share where there is room for a little."""
    words = tag("span", f"{_words(name)}\N{NO-BREAK SPACE}", class_="long" if len(name) > 8 else "word")
    share = tag("span", percent(number / total, 0), class_="share")
    tip = f"{_words(name)} {percent(number / total)}\n{count(number)} of {count(total)} {what}"
    return tag("i", words, share, class_=name, style=f"flex-grow:{max(1, 10_000 * number // total)}", data_tip=tip)


def _both(prompts: Mapping[str, int], tokens: Mapping[str, int], name: str) -> str:
    return f"{count(prompts.get(name, 0))} / {count(tokens.get(name, 0))}"


def _words(name: str) -> str:
    return name.replace("_", " ")
