"""What a reader is, and how it checks what it reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from headwater.traces.request import Request
from headwater.traces.source import Source
from headwater.traces.tokens import Tokens


class Reader(Protocol):
    """Reads one format. Made for one file.

    What a record lacks or has wrong is raised as KeyError, TypeError, ValueError or IndexError.
    """

    block_tokens: int  # of the trace, known once it is read
    interleaved: bool  # whether a session may go on after another has begun

    def __init__(self, tokens: Tokens) -> None: ...

    @staticmethod
    def matches(first: Any) -> bool:
        """Whether a file whose first record is this has the format."""

    def requests(self, source: Source) -> Iterator[Request]:
        """In the file's order."""

    def notes(self) -> tuple[str, ...]:
        """What was inferred or left out, once it is read."""


def has(record: Any, *names: str) -> bool:
    return isinstance(record, dict) and all(name in record for name in names)


def whole(record: Mapping[str, Any], name: str) -> int:
    """A field that counts something. Raises KeyError, or ValueError with what it is."""
    value = record[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {str(value)[:40]!r}, must be a whole number of 0 or more")
    return value


def seconds(record: Mapping[str, Any]) -> float | None:
    """`t` or `time` in seconds, or `timestamp` in milliseconds; None: not recorded. Raises ValueError."""
    for name, scale in (("t", 1.0), ("time", 1.0), ("timestamp", 1000.0)):
        value = record.get(name)
        if value is not None:
            return finite(value, name) / scale
    return None


def finite(value: Any, name: str) -> float:
    """A number of seconds. Raises ValueError with what it is; JSON as Python reads it has NaN and Infinity."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} is {str(value)[:40]!r}, must be a number")
    return float(value)
