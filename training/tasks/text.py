"""Plain English: paragraphs of novels and of technical documentation, in simple sentences.

The novels' own "valid" books are the test; of the documentation, one page in HELD_OUT.
"""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zlib import crc32

import zstandard

from training.tasks.budget import Count
from training.tasks.example import TEXT, Example
from training.tasks.split import TEST, TRAIN

NOVELS, MANUALS = "text_standardebooks", "text_python_docs"
MANUAL_SHARE = 0.05  # of passages
HELD_OUT = 20
VALID = "valid"  # in the name of the novels' file that is the test
LONGEST_SENTENCE = 24  # words, on average over a paragraph
LONGEST_WORD = 4.6  # characters, on average over a paragraph
LETTERS = 0.85  # share of a paragraph's characters without spaces, at the least
SHORTEST = 60  # characters of a paragraph
STRAIGHT = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": " - ", "–": "-", "…": "...", "\u00a0": " "})
CUT_MARGIN = 0.9  # the tokens of a part of a paragraph are not even
SENTENCE_END = re.compile(r"[.!?]+")
SIGNS = re.compile(r"[`{}<>*_=|\\~^]|::|^[^\w\"]")  # of markup and code

FALLBACK = """
The harbour lay still in the early light, and the boats were tied in a long row along the wall.

An old man sat on a wooden box and mended a net. He did not look up when the children ran past him to the water.

"There will be wind before noon," he said to nobody. "There is always wind when the birds are quiet."

The train was late, so we walked along the river until we came to the mill. The wheel had not turned for many years.

She kept the letters in a small green box and read one of them each winter, on the evening of the first snow.

When the bell rang, everybody stopped talking. The door opened, and the teacher came in with a map under his arm.
"""


@dataclass(frozen=True, slots=True)
class Passages:
    """Documents by split, each a list of paragraphs; every split has a novel."""

    novels: dict[str, list[list[str]]]
    manuals: dict[str, list[list[str]]]

    def draw(self, rng: random.Random, tokens: int, split: str, count: Count) -> Example:
        """Paragraphs that follow each other, as many as fit; the last one is cut."""
        parts: list[str] = []
        left = tokens - 1
        for paragraph in self._running(rng, split):
            size = count(paragraph) + 1
            if size > left:
                parts.append(_cut(paragraph, left / size))
                break
            parts.append(paragraph)
            left -= size
        text = "\n\n".join(part for part in parts if part)
        return Example(TEXT, [{"role": "assistant", "content": text}])

    def paragraphs(self, split: str) -> Iterator[str]:
        for documents in (self.novels, self.manuals):
            for document in documents[split]:
                yield from document

    def _running(self, rng: random.Random, split: str) -> Iterator[str]:
        """From somewhere in a document to its end, then from somewhere in another, without end."""
        documents = self.novels[split]
        if self.manuals[split] and rng.random() < MANUAL_SHARE:
            documents = self.manuals[split]
        while True:
            document = rng.choice(documents)
            yield from document[rng.randrange(len(document)) :]


def passages(folder: Path) -> Passages:
    """Return the passages of the folder's novels and manuals; raise FileNotFoundError if there are no novels."""
    novels = sorted((folder / NOVELS).glob("*.jsonl.zst"))
    if not novels:
        raise FileNotFoundError(f"{folder / NOVELS} has no *.jsonl.zst")
    manuals = [record for file in sorted((folder / MANUALS).glob("*.jsonl.zst")) for record in _records(file)]
    return Passages(
        {
            TRAIN: _documents(text for file in novels if VALID not in file.name for _, text in _records(file)),
            TEST: _documents(text for file in novels if VALID in file.name for _, text in _records(file)),
        },
        {
            TRAIN: _documents(text for name, text in manuals if not held_out(name)),
            TEST: _documents(text for name, text in manuals if held_out(name)),
        },
    )


@cache
def fallback() -> Passages:
    """A few paragraphs of our own, for runs that only try things out: the last of them is the test."""
    train, _, test = FALLBACK.strip().rpartition("\n\n")
    return Passages({TRAIN: _documents([train]), TEST: _documents([test])}, {TRAIN: [], TEST: []})


def held_out(name: str) -> bool:
    return crc32(name.encode()) % HELD_OUT == 0


def simple(paragraph: str) -> bool:
    """Return whether a paragraph is prose in short words and sentences."""
    words = paragraph.split()
    letters = sum(map(str.isalpha, paragraph))
    sentences = max(1, len(SENTENCE_END.findall(paragraph)))
    return (
        len(paragraph) >= SHORTEST
        and paragraph.isascii()
        and not SIGNS.search(paragraph)
        and letters >= LETTERS * sum(map(len, words))
        and letters <= LONGEST_WORD * len(words)
        and len(words) / sentences <= LONGEST_SENTENCE
    )


def _records(file: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of a file's documents."""
    with file.open("rb") as packed:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(packed), encoding="utf-8"):
            record = json.loads(line)
            yield record["id"], record["text"]


def _documents(texts: Iterable[str]) -> list[list[str]]:
    """Simple paragraphs of each text that has some."""
    straight = (text.translate(STRAIGHT).split("\n\n") for text in texts)
    kept = ([p for p in (" ".join(paragraph.split()) for paragraph in text) if simple(p)] for text in straight)
    return [paragraphs for paragraphs in kept if paragraphs]


def _cut(paragraph: str, share: float) -> str:
    """So much of a paragraph, in whole words."""
    words = paragraph.split(" ")
    return " ".join(words[: int(share * len(words) * CUT_MARGIN)])
