"""The trained model's byte-level BPE tokenizer, and examples as ids with the weight of each."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from headwater.models.files import embedded
from training.bpe import END_OF_TEXT, MARKUP, TURN_END, TURN_MARKS, TURN_START, byte_pairs
from training.recipe import EXAMPLES, VOCABULARY
from training.tasks import Example, draw
from training.tasks.budget import Count
from training.tasks.example import KINDS, TEXT
from training.tasks.recall import SEGMENT
from training.tasks.split import TRAIN
from training.tasks.text import Passages, fallback
from training.tasks.words import SYLLABLES
from training.template import example_text

SPECIAL = (*TURN_MARKS, SEGMENT)
EXAMPLE_TOKENS = 512  # of an example, for the vocabulary
PROSE = 3_000_000  # characters of plain text, for the vocabulary
CODE = re.compile(r"\b[A-Z]{2}-\d{3}\b")
NAME = re.compile(r"\b[A-Z][a-z]+\b")
# that each syllable is seen besides, for each example: it becomes a token before what it shares with words does
SYLLABLE_TIMES = 7
CUT = "\0"  # between syllables
PROMPT_WEIGHT = 0.1  # of the loss on what others say; what the assistant says counts 1


def train(
    texts: Passages | None = None, vocab_size: int = VOCABULARY, seed: int = 0, examples: int = EXAMPLES
) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` tokens; the same texts and seed give the same one.

    `examples`: conversations of the mixture that it learns from, next to plain text.
    """
    return byte_pairs(vocab_size, _corpus(texts or fallback(), seed, examples), SPECIAL)


def load(path: Path | None = None) -> Tokenizer:
    """Load the tokenizer of a tokenizer.json, by default the embedded model's."""
    return Tokenizer.from_file(str(path or embedded() / "tokenizer.json"))


def encode(example: Example, tokenizer: Tokenizer | None = None) -> tuple[list[int], list[float]]:
    """The ids that the server makes of the conversation, and what each counts as a target of the loss.

    What the assistant says, with the mark that ends it, counts 1, all else PROMPT_WEIGHT. Plain text counts 1
    throughout and ends with <|endoftext|>. Without a tokenizer it is the embedded model's.
    """
    tokenizer = tokenizer or _loaded()
    text = example_text(example)
    if example.kind == TEXT:
        ids = tokenizer.encode(text + END_OF_TEXT, add_special_tokens=False).ids
        return ids, [1.0] * len(ids)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return ids, _weights(ids, _marks(tokenizer))


def counter(tokenizer: Tokenizer | None = None) -> Count:
    """Return the exact token counter for `training.tasks.draw`."""
    tokenizer = tokenizer or _loaded()
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _weights(ids: list[int], marks: tuple[tuple[int, ...], int]) -> list[float]:
    opening, end = marks
    weights = [PROMPT_WEIGHT] * len(ids)
    start = opening[0]
    at = 0
    while True:
        try:
            at = ids.index(start, at)
        except ValueError:
            return weights
        first = at + len(opening)
        at += 1
        if tuple(ids[at - 1 : first]) == opening:
            at = ids.index(end, first) + 1
            weights[first:at] = [1.0] * (at - first)


@cache
def _loaded() -> Tokenizer:
    return load()


def _marks(tokenizer: Tokenizer) -> tuple[tuple[int, ...], int]:
    """The ids that open the assistant's turn, and the one that ends a turn."""
    opening, (end,) = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in (f"{TURN_START}assistant\n", TURN_END)
    )
    return tuple(opening), end


def _corpus(texts: Passages, seed: int, examples: int) -> Iterator[str]:
    """The mixture's train split.

    Names come as their syllables, and codes not at all, so that none becomes a token as a whole: the names of the test
    are then made of the same tokens as those of the training.
    """
    rng = random.Random(seed)
    kinds = [kind for kind in KINDS if kind != TEXT]
    for _ in range(examples):
        text = CODE.sub("", example_text(draw(rng, EXAMPLE_TOKENS, TRAIN, kinds)))
        yield from _without_markup(NAME.sub(_in_syllables, text))
    for syllable in sorted({syllable for name in SYLLABLES.values() for syllable in name}):
        yield (f" {syllable}" if syllable[0].isupper() else f"\n{syllable}") * (SYLLABLE_TIMES * examples)
    yield from _some(texts.paragraphs(TRAIN), rng)


def _in_syllables(name: re.Match[str]) -> str:
    return CUT.join(SYLLABLES.get(name[0], (name[0],)))


def _without_markup(text: str) -> Iterable[str]:
    return (part for part in re.split("|".join(map(re.escape, (*SPECIAL, *MARKUP, CUT))), text) if part)


def _some(paragraphs: Iterable[str], rng: random.Random) -> Iterator[str]:
    shuffled = list(paragraphs)
    rng.shuffle(shuffled)
    characters = 0
    for paragraph in shuffled:
        if (characters := characters + len(paragraph)) > PROSE:
            return
        yield paragraph
