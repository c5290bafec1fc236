"""Lists of names with a value each, and questions for a name's value: recall with nothing around it, learned first."""

from __future__ import annotations

import random

from training.tasks.budget import TURN, Count
from training.tasks.conversation import assembled, said
from training.tasks.example import PAIRS, Example
from training.tasks.words import Drawer

NAMES = ("person", "town", "firm", "thing", "event", "place")
VALUES = (
    "person",
    "town",
    "firm",
    "code",
    "number",
    "price",
    "date",
    "year",
    "job",
    "goods",
    "room",
    "colour",
    "drink",
)
WORD = "word"
HEADINGS = ("List:\n", "This is the list.\n", "Here is a list.\n", "Remember this list.\n")
BETWEEN = (": ", " - ", " has ", " is beside ", " goes with ")
PLAIN = 0.5  # of lists have plain words on both sides: a token each, the simplest there is
NUMBERS = ((2, 4), (3, 8), (6, 24))  # of pairs
BULLETS = ("", "- ", "* ")  # with one, a name is the same token in its line as in a question
ASKING = ("{}?", "And {}?", "What about {}?", "What is said of {}?")
REPEATED, SHUFFLED = 0.15, 0.35  # of lists are repeated, in the same or another order
REPEAT, SHUFFLE = "Say the list again.", "Say the list again in another order."


def draw(rng: random.Random, tokens: int, split: str, count: Count) -> Example:
    """A list of pairs, and as many of its names as fit, each asked once; or the whole list said again."""
    drawer = Drawer(rng, split)
    frame = rng.choice(BULLETS) + "{}" + rng.choice(BETWEEN) + "{}"
    asking = rng.choice(ASKING)
    pairs = _pairs(drawer, tokens, count)
    shown = rng.choice(HEADINGS) + _lines(list(pairs), pairs, frame) + "\n\n"
    which = rng.random()
    names = list(pairs) if which < REPEATED else rng.sample(list(pairs), len(pairs))
    if which < REPEATED + SHUFFLED:
        turns = [said(shown + (REPEAT if which < REPEATED else SHUFFLE), _lines(names, pairs, frame))]
    else:
        turns = [
            said((shown if i == 0 else "") + asking.format(name), pairs[name], PAIRS) for i, name in enumerate(names)
        ]
    return assembled(PAIRS, "", turns, (tokens, count))


def _pairs(drawer: Drawer, tokens: int, count: Count) -> dict[str, str]:
    rng = drawer.rng
    kinds, values = rng.choice((rng.sample(NAMES, 1), NAMES)), rng.choice((rng.sample(VALUES, 1), VALUES))
    if rng.random() < PLAIN:
        kinds, values = (WORD,), (WORD,)
    pairs: dict[str, str] = {}
    left = tokens - 3 * TURN
    for _ in range(rng.randint(*rng.choice(NUMBERS))):
        name, value = drawer.draw(rng.choice(kinds)), drawer.draw(rng.choice(values))
        left -= 2 * (count(name) + count(value)) + 2 * TURN  # it is stated, and asked
        if left < 0 and pairs:
            break
        pairs.setdefault(name, value)
    return pairs


def _lines(names: list[str], pairs: dict[str, str], frame: str) -> str:
    return "\n".join(frame.format(name, pairs[name]) for name in names)
