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
FEWEST, MOST = 2, 24  # pairs


def draw(rng: random.Random, tokens: int, split: str, count: Count) -> Example:
    """A list of pairs, and as many of its names as fit, each asked once."""
    drawer = Drawer(rng, split)
    between = rng.choice(BETWEEN)
    kinds = rng.choice((rng.sample(NAMES, 1), NAMES))
    values = rng.choice((rng.sample(VALUES, 1), VALUES))
    wanted = rng.randint(FEWEST, MOST)
    pairs: dict[str, str] = {}
    left = tokens - 2 * TURN
    for _ in range(wanted):
        name, value = drawer.draw(rng.choice(kinds)), drawer.draw(rng.choice(values))
        left -= 2 * (count(name) + count(value)) + TURN + 4  # it is said, and asked
        if left < 0 and len(pairs) >= FEWEST:
            break
        pairs.setdefault(name, value)
    heading = rng.choice(HEADINGS) + "".join(f"{name}{between}{value}\n" for name, value in pairs.items()) + "\n"
    asked = rng.sample(list(pairs), len(pairs))
    turns = [said((heading if i == 0 else "") + f"{name}?", pairs[name], PAIRS) for i, name in enumerate(asked)]
    return assembled(PAIRS, "", turns, (tokens, count))
