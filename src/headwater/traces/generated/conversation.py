"""Texts of drawn traffic: token ids that were never used before, texts that are shared, and conversations of both."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from headwater.request import Boundaries
from headwater.traces.generated.dice import Dice
from headwater.traces.request import Request

SECOND, HOUR = 1000, 3_600_000  # times are in milliseconds
LONGEST = 32_768  # tokens of a prompt
SPREAD = 70  # percent of an octave: the usual spread of lengths


@dataclass(slots=True)
class TokenIds:
    """Token ids from 0 on, of which the first `used` are in texts."""

    used: int = 0


class Words:
    """Source of texts. A named text is the same at each use, and its length depends only on its name."""

    def __init__(self, ids: TokenIds, *key: int) -> None:
        self._key, self._ids = key, ids
        self._named: dict[tuple[int, ...], array[int]] = {}

    def new(self, tokens: int) -> array[int]:
        """Return token ids that no other text has."""
        first = self._ids.used
        self._ids.used += tokens
        return array("i", range(first, first + tokens))

    def named(self, *name: int, median: int, spread: int = SPREAD) -> array[int]:
        """Return the text of that name, of a log-normal length."""
        if name not in self._named:
            self._named[name] = self.new(Dice(*self._key, *name).around(median, spread))
        return self._named[name]


@dataclass(slots=True)
class Conversation:
    """Messages one after the other, and the requests that were made so far. Times in milliseconds."""

    session: str
    system: array[int]
    text: array[int] = field(default_factory=lambda: array("i"))
    _asked: list[tuple[int, int, int, int]] = field(default_factory=list)  # time, start of the query, end, answer

    def __post_init__(self) -> None:
        self.text = (self.text or self.system)[:]  # it grows, and others may begin alike

    def ask(self, at: int, query: array[int], answer: array[int]) -> None:
        start = len(self.text)
        self.text += query
        self._asked.append((at, start, len(self.text), len(answer)))
        self.text += answer

    def ends(self) -> list[int]:
        """Return the tokens up to the end of each answer."""
        return [end + answer for _, _, end, answer in self._asked]

    def until(self, end: int, session: str = "") -> Conversation:
        """Return a conversation that continues after the first `end` tokens; the session is the same by default."""
        return Conversation(session or self.session, self.system, self.text[:end])

    def requests(self) -> Iterator[Request]:
        """Yield the requests so far, which share one text."""
        text = self.text.tobytes()
        for at, start, end, answer in self._asked:
            yield asked(self.session, text, at, (len(self.system), start, end), answer)


def asked(session: str, text: bytes, at: int, parts: tuple[int, int, int], answer: int) -> Request:
    """Return a request. parts: the ends of the system prompt, of what precedes the query, and of the prompt."""
    system, start, end = parts
    return Request(
        session, text, end, answer, end + answer, at / 1000, boundaries=Boundaries(system or None, start, end - 1)
    )


def milliseconds(request: Request) -> int:
    """Return the time of a drawn request."""
    assert request.at is not None, "drawn requests have times"
    return round(1000 * request.at)
