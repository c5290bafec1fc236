"""Ends of the bare values of calls in tags: one rule for the parser and for the grammar.

A value ends with its closing tag, if another tag of the call follows. If the closing tag is missing, the value ends
before the next parameter or the end of the call. All other text is part of the value, tags too.

In a call on lines, as templates write it, an end has a line end, which no JSON text has within a string.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from headwater.server.requests.structured import quoted

SPACE, LINE_END = r"[ \t\r\n]*", r"[ \t\r]*\n[ \t\r\n]*"  # regular expressions
ANY_KEY = r"[^<>\n]+"


class Tags(Protocol):
    """Tags of a format."""

    @property
    def function(self) -> tuple[str, str, str]: ...

    @property
    def parameter(self) -> tuple[str, str, str]: ...

    @property
    def close(self) -> str: ...

    @property
    def line(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ValueEnds:
    """Regular expressions of the ends."""

    whole: re.Pattern[str]  # an end, up to the tag that follows
    begun: re.Pattern[str]  # the beginning of an end, at the end of a text
    last: re.Pattern[str]  # a closing tag at the end of an answer

    def safe(self, text: str, at: int = 0) -> int:
        """Return the position from which the text may be the beginning of an end."""
        begun = self.begun.search(text, at)
        return len(text) if begun is None else begun.start()


@lru_cache(maxsize=1024)
def value_ends(tags: Tags, later: tuple[str, ...] | None, lined: bool) -> ValueEnds:
    """Return the ends of a parameter's value.

    `later`: the parameters that come after it in the tool's schema; None: the tool has none, so any key may come.
    `lined`: the call is written on lines.
    """
    end, last, begin = map(re.escape, (tags.parameter[2], tags.function[2], tags.parameter[0]))
    parts = [_beginning(tag) for tag in (*tags.parameter[::2], tags.function[2], tags.close)]
    parts += [rf"{last}{SPACE}(?:{_beginning(tags.close)})?", rf"{begin}[^\n]*"]
    return ValueEnds(
        re.compile("|".join(f"{before}(?={after})" for before, after in _ends(tags, later, lined, re.escape))),
        re.compile(rf"(?:\n(?:{end}{SPACE})?|{end}{SPACE})?(?:{'|'.join(parts)})?\Z"),
        re.compile(rf"\n?{end}{SPACE}\Z"),
    )


def unreadable(tags: Tags, quote: Callable[[str], str] = quoted) -> str:
    """Return a regular expression, by default llguidance's, for what cannot stand in a value of a call on lines.

    That is an end and the tag that follows, whatever the keys: one expression for all parameters of all tools, since
    each costs the compiler a seventh of what it may use.
    """
    return "|".join(before + after for before, after in _ends(tags, None, True, quote))


def _ends(tags: Tags, later: tuple[str, ...] | None, lined: bool, quote: Callable[[str], str]) -> list[tuple[str, str]]:
    """Return expressions for the ends, each with one for what follows."""
    begin, named, end, last, close, line = map(quote, (*tags.parameter, tags.function[2], tags.close, tags.line))
    follows = f"({begin}|{last}|{close})"
    if not lined:
        return [(rf"\n?{end}{SPACE}", follows), (rf"\n?({end}{SPACE})?", f"{last}{SPACE}{close}")]
    key = ANY_KEY if later is None else "|".join(map(quote, later))
    return [
        (rf"\n{end}{SPACE}", follows),
        (rf"{end}{LINE_END}", follows),
        (rf"\n?({end}{SPACE})?", f"{last}{LINE_END}{close}"),
        *([(r"\n", f"{begin}({key}){named}{line}")] if key else []),
    ]


def _beginning(tag: str) -> str:
    """Return a regular expression for the beginnings of a tag."""
    return "".join(f"{re.escape(sign)}(?:" for sign in tag[:-1]) + re.escape(tag[-1]) + ")?" * (len(tag) - 1)
