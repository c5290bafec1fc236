"""Fuzz target: a function that takes bytes and raises only if the code has a defect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """`run` swallows the errors that the code declares and lets all others out."""

    run: Callable[[bytes], None]
    seeds: Sequence[bytes]
    words: Sequence[bytes] = ()  # that a mutation may put in
    seconds: int = 10  # that one input may take


class Drawn:
    """Choices made by bytes: any bytes make some, so that mutations of them are mutations of the choices."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def below(self, limit: int) -> int:
        """0 once the bytes are used up."""
        width = 1 if limit <= 256 else 2
        part = self._data[self._at : self._at + width]
        self._at += width
        return int.from_bytes(part, "big") % limit

    def choice(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def some_bytes(self, most: int) -> bytes:
        size = self.below(most + 1)
        part = self._data[self._at : self._at + size]
        self._at += size
        return part

    def text(self, most: int) -> str:
        return self.some_bytes(most).decode("utf-8", "replace")

    @property
    def rest(self) -> bytes:
        return self._data[self._at :]


def pieces(data: bytes, whole: Sequence[T]) -> list[Sequence[T]]:
    """`whole` cut where the bytes say."""
    cuts = sorted({byte % (len(whole) + 1) for byte in data})
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
