"""Runs of tokens in a growing text, and where each of them stood before."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

WIDTH = 3  # tokens of a run
BITS = 24  # of a token's number
NO_TOKEN = 2**BITS - 1  # ends a text within several
_MASK = 2 ** (BITS * WIDTH) - 1


def key_of(tokens: Iterable[int]) -> int:
    """Return the number of the run that the last tokens make."""
    key = 0
    for token in tokens:
        key = (key << BITS | token) & _MASK
    return key


class Runs:
    """A text, and the places of its runs of three tokens. Takes 12 bytes a token and about 100 a distinct run."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i")
        self._key = 0
        self._last: dict[int, int] = {}  # by run: the index after its last occurrence
        self._before = array("q")  # by that index less 1: the index after the occurrence before it; 0: none
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end."""
        for token in tokens:
            self.tokens.append(token)
            self._key = (self._key << BITS | token) & _MASK
            end, before = len(self.tokens), 0
            if end >= WIDTH:
                before = self._last.get(self._key, 0)
                self._last[self._key] = end
            self._before.append(before)

    def places(self, key: int, most: int) -> Iterator[int]:
        """Yield the indices after at most so many occurrences of a run that a token follows, the last one first."""
        end = self._last.get(key, 0)
        if end == len(self.tokens):
            end = self._before[end - 1] if end else 0
        while end and most:
            yield end
            end, most = self._before[end - 1], most - 1

    def agreement(self, end: int, context: array[int], most: int) -> int:
        """Return how many tokens before `end`, at most `most`, are the last ones of a context."""
        most, tokens, size = min(most, end, len(context)), self.tokens, len(context)
        if tokens[end - most : end] == context[size - most :]:
            return most
        n, more = 0, most.bit_length()  # the largest n whose last tokens agree, bit by bit
        while more:
            more -= 1
            longer = n + (1 << more)
            if longer < most and tokens[end - longer : end - n] == context[size - longer : size - n]:
                n = longer
        return n
