"""Azure's LLM inference traces: a CSV with TIMESTAMP, ContextTokens, GeneratedTokens. Times and lengths, no content."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime

from headwater.traces.point import Point
from headwater.traces.source import Source


def matches(line: bytes) -> bool:
    return line.startswith(b"TIMESTAMP,")


def points(source: Source, seed: int) -> Iterator[Point]:
    """As recorded, from 0 seconds on: nothing is drawn. Raises KeyError, TypeError, ValueError for a malformed row."""
    begin: float | None = None
    for row in csv.DictReader(line.decode() for line in source.lines()):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()  # it has a digit more than are read
        begin = at if begin is None else begin
        yield Point(at - begin, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
