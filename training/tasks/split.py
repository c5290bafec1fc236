"""Split into training and test by a checksum of the text, independent of its order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from zlib import crc32

TRAIN, TEST = "train", "test"
SPLITS = (TRAIN, TEST)
SHARE = 5  # one in this number belongs to the test
ALTERNATIVES = re.compile(r"\[([^\]]*)\]")
WORD = re.compile(r"[\w']+|\{[^}]*\}")


def belongs(text: str, split: str) -> bool:
    """Return whether a name or a value belongs to this split."""
    return (crc32(text.encode()) % SHARE == 0) == (split == TEST)


def expanded(*patterns: str) -> list[str]:
    """All wordings of patterns with alternatives: "[Who|What] is it?" gives two."""
    wordings: dict[str, None] = {}
    for pattern in patterns:
        parts = ALTERNATIVES.split(pattern)
        choices = [part.split("|") if at % 2 else [part] for at, part in enumerate(parts)]
        wordings.update(dict.fromkeys("".join(chosen) for chosen in product(*choices)))
    return list(wordings)


def words(wordings: Iterable[str]) -> set[str]:
    return {word.lower() for wording in wordings for word in WORD.findall(wording)}


def parted(wordings: list[str]) -> dict[str, tuple[str, ...]]:
    """Wordings by split. A held-out one has only words that the remaining ones have, too."""
    held: list[str] = []
    for wording in sorted(wordings, key=lambda text: crc32(text.encode())):
        rest = [other for other in wordings if other != wording and other not in held]
        if len(held) < len(wordings) // SHARE and words([wording]) <= words(rest):
            held.append(wording)
    return {TRAIN: tuple(text for text in wordings if text not in held), TEST: tuple(held)}


def wordings(*patterns: str) -> dict[str, tuple[str, ...]]:
    return parted(expanded(*patterns))
