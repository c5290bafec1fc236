"""Numbers in prose, filled in from results files.

`numbers.toml` names, for each number, its page, the words around it with `{}` for the number, and its source: a
results file and a row.
"""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?)"


@dataclass(frozen=True)
class Number:
    """A number of a page: `text` is the words around it, `row` the name of its row in `file`."""

    page: str
    text: str
    file: str
    row: str
    digits: int

    def value(self) -> str:
        """Return the number as the page shows it. Raises KeyError if the results file has no such row."""
        rows: list[dict[str, Any]] = json.loads((ROOT / self.file).read_text(encoding="utf-8"))["rows"]
        for row in rows:
            if self.row == row.get("name", row.get("label")):
                found = statistics.median(row["values"]) if "values" in row else row["ours"]
                return f"{found:,.{self.digits}f}"
        raise KeyError(f"{self.file} has no row {self.row!r}")

    def fill(self, text: str) -> str:
        """Return a page's text with this number. Raises ValueError unless the words stand in it exactly once."""
        words = re.escape(self.text).replace(r"\{\}", NUMBER).replace(r"\ ", r"\s+")
        found = list(re.finditer(words, text))
        if len(found) != 1:
            raise ValueError(f"{self.page} has {self.text!r} {len(found)} times, not once")
        return text[: found[0].start(1)] + self.value() + text[found[0].end(1) :]


def declared() -> list[Number]:
    """Return all declared numbers, in the order of the file."""
    document = tomllib.loads((Path(__file__).parent / "numbers.toml").read_text(encoding="utf-8"))
    return [Number(**one) for one in document["number"]]


def filled(page: str) -> str:
    """Return a page's text with all of its declared numbers."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for number in declared():
        if number.page == page:
            text = number.fill(text)
    return text


def pages() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield each page that has declared numbers, with the function that returns its text."""
    for page in sorted({number.page for number in declared()}):
        yield page, partial(filled, page)
