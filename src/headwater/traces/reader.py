"""Interface of a trace reader, and checks of the fields that it reads."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

from headwater.errors import ConfigError
from headwater.traces.request import Request
from headwater.traces.source import Source
from headwater.traces.tokens import Tokens


class Reader(ABC):
    """Reader of one format, created for one file.

    A record with a missing or wrong field raises KeyError, TypeError, ValueError or IndexError.
    """

    about: ClassVar[str] = ""  # one line for `headwater replay --formats`
    fields: ClassVar[tuple[str, ...]] = ()  # of its records, to find the nearest format of an unknown file
    is_folder: ClassVar[bool] = False  # whether a file is one session, and a folder of files a trace
    is_sizable: ClassVar[bool] = False  # whether its hashed blocks may have another size than usual
    block_tokens = 1  # of the trace; known once the file is read
    has_token_ids = True  # the same
    interleaved = False  # whether a session may continue after another has begun

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    @staticmethod
    @abstractmethod
    def matches(first: Any) -> bool:
        """Return whether a file whose first record is `first` has the format; a first line without JSON is bytes."""

    def read_blocks_of(self, tokens: int) -> None:
        """Read hashed blocks of that many tokens. Raises ConfigError if the format has none, or states their size."""
        if not self.is_sizable:
            raise ConfigError(f"--block-tokens {tokens}: this trace is not in hashed blocks whose size it leaves open")
        self.block_tokens = tokens

    @abstractmethod
    def requests(self, source: Source) -> Iterator[Request]:
        """Yield the requests in the file's order."""

    def notes(self) -> tuple[str, ...]:
        """Return remarks on inferred and omitted values; called after the file is read."""
        return ()


def has(record: Any, *names: str) -> bool:
    """Return whether the record is an object with all these fields."""
    return isinstance(record, dict) and all(name in record for name in names)


def whole(record: Mapping[str, Any], name: str) -> int:
    """Return a field that is a count. Raises KeyError if it is missing, ValueError with its value if it is none."""
    value = record[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {str(value)[:40]!r}, must be a whole number of 0 or more")
    return value


def calls_of(session: Mapping[str, Any]) -> list[int]:
    """Return a session's `calls`, the numbers of its answers among the messages. Raises ValueError for other values."""
    calls, most = session["calls"], len(session["messages"]) - 1
    numbers = isinstance(calls, list) and all(type(number) is int for number in calls)
    if not numbers or sorted(set(calls)) != calls or (calls and not 0 < calls[0] <= calls[-1] <= most):
        must = f"must ascend from 1 to at most {most:,}: each is the number of a message that is an answer"
        raise ValueError(f"calls are {str(calls)[:60]}, {must}")
    return list(calls)


def seconds(record: Mapping[str, Any]) -> float | None:
    """Return `t`, `ts` or `time` (seconds) or `timestamp` (milliseconds) in seconds; None if none is recorded.

    A text is a date and time.
    """
    for name, scale in (("t", 1.0), ("ts", 1.0), ("time", 1.0), ("timestamp", 1000.0)):
        value = record.get(name)
        if value is not None:
            return instant(value) if isinstance(value, str) else finite(value, name) / scale
    return None


def instant(text: str) -> float:
    """Return an ISO 8601 date and time as seconds since 1970. Without a zone it is UTC. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def finite(value: Any, name: str) -> float:
    """Return a finite number. Raises ValueError with its value: JSON as Python reads it has NaN and Infinity."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} is {str(value)[:40]!r}, must be a number")
    return float(value)
