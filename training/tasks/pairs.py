"""Lists of names with a value each, and what stands beside a name: recall with nothing around it, learned first."""

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
HEADINGS = ("List:\n", "This is the list.\n", "Here is a list.\n", "Remember this list.\n")
BETWEEN = (": ", " - ", " has ", " is beside ", " goes with ")
NUMBERS = ((2, 4), (3, 8), (6, 24))  # of pairs
REPEATED, SHUFFLED = 0.15, 0.35  # of lists are said again, as they stand or in another order
REPEAT, SHUFFLE = "Say the list again.", "Say the list again in another order."


def draw(rng: random.Random, tokens: int, split: str, count: Count) -> Example:
    """A list of pairs, and as many of its names as fit, each asked once; or the whole list said again."""
    drawer = Drawer(rng, split)
    between = rng.choice(BETWEEN)
    pairs = _pairs(drawer, tokens, count)
    shown = rng.choice(HEADINGS) + _lines(list(pairs), pairs, between) + "\n\n"
    which = rng.random()
    names = list(pairs) if which < REPEATED else rng.sample(list(pairs), len(pairs))
    if which < REPEATED + SHUFFLED:
        turns = [said(shown + (REPEAT if which < REPEATED else SHUFFLE), _lines(names, pairs, between))]
    else:
        turns = [said((shown if i == 0 else "") + f"{name}?", pairs[name], PAIRS) for i, name in enumerate(names)]
    return assembled(PAIRS, "", turns, (tokens, count))


def _pairs(drawer: Drawer, tokens: int, count: Count) -> dict[str, str]:
    rng = drawer.rng
    kinds = rng.choice((rng.sample(NAMES, 1), NAMES))
    values = rng.choice((rng.sample(VALUES, 1), VALUES))
    pairs: dict[str, str] = {}
    left = tokens - 3 * TURN
    for _ in range(rng.randint(*rng.choice(NUMBERS))):
        name, value = drawer.draw(rng.choice(kinds)), drawer.draw(rng.choice(values))
        left -= 2 * (count(name) + count(value)) + 2 * TURN  # it is said, and asked
        if left < 0 and pairs:
            break
        pairs.setdefault(name, value)
    return pairs


def _lines(names: list[str], pairs: dict[str, str], between: str) -> str:
    return "\n".join(f"{name}{between}{pairs[name]}" for name in names)
