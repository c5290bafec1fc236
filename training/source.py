"""Sequences of one length, made of conversations and texts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer

from training import tokenizer as tokens
from training.bpe import TURN_MARKS
from training.segments import Marks
from training.tasks import Example, draw
from training.tasks.example import KINDS, PAIRS, RECALL
from training.tasks.mixture import FEWEST_TOKENS
from training.tasks.recall import SEGMENT
from training.tasks.split import TRAIN
from training.tasks.text import Passages, fallback, passages

SHORTEST = 0.5  # share of the room left that a conversation is to fill at least
MIN_FILLED_TOKENS = 48  # fewer are left empty
PROMPT, OTHER = "prompt", "other"
LABELS = (
    PROMPT,
    OTHER,
    *KINDS,
)  # of tokens: in the prompt, in no answer, in an answer to a kind of question


@dataclass(frozen=True)
class Source:
    """Source of examples: a tokenizer and plain text."""

    tokenizer: Tokenizer
    texts: Passages

    @cached_property
    def marks(self) -> Marks:
        separator, *ends = (self.tokenizer.token_to_id(mark) for mark in (SEGMENT, *TURN_MARKS))
        return Marks(separator, frozenset(ends))

    @classmethod
    def load(cls, tokenizer: Path, texts: Path | None) -> Source:
        """`texts`: the folder of plain text, or None for a few paragraphs."""
        return cls(tokens.load(tokenizer), passages(texts) if texts else fallback())

    def sequence(
        self, rng: random.Random, length: int, kind: str, recall: dict[str, float], split: str = TRAIN
    ) -> tuple[list[int], list[int]]:
        """At most `length` ids, and their labels' places in LABELS; conversations follow each other until it is full.

        Where no conversation fits any more, a list fills it, and is cut.

        Questions about documents are of all kinds that `recall` has, with its weights.
        """
        ids: list[int] = []
        labels: list[int] = []
        kinds = recall if kind in RECALL else {kind: 1.0}
        while (room := length - len(ids)) >= MIN_FILLED_TOKENS:
            wanted = max(FEWEST_TOKENS, round(room * rng.uniform(SHORTEST, 1.0)))
            example = draw(rng, wanted, split, kinds if room >= FEWEST_TOKENS else {PAIRS: 1.0}, texts=self.texts)
            more, weights = tokens.encode(example, self.tokenizer)
            ids += more[:room]
            labels += labelled(example, weights)[:room]
        return ids, labels


def labelled(example: Example, weights: list[float]) -> list[int]:
    """The label of each token: runs of full weight are what the assistant says, turn by turn."""
    said = (i for i, message in enumerate(example.messages) if message["role"] == "assistant")
    kinds = dict(zip(example.turns, (kind for kind, _ in example.asked), strict=True))
    labels: list[int] = []
    for full, run in groupby(weight == 1.0 for weight in weights):
        name = (kinds.get(next(said), OTHER) if example.messages[1:] else example.kind) if full else PROMPT
        labels += [LABELS.index(name)] * len(list(run))
    return labels
