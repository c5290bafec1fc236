"""Short exchanges that need no facts, between those that do."""

from __future__ import annotations

import random

from training.tasks.conversation import Turn, said
from training.tasks.split import wordings
from training.tasks.words import Drawer

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

FIXED = (
    (wordings("[Hello|Hi|Good morning|Good evening][.|!|, there.]"), "Hello. What can I do for you?"),
    (wordings("[Thank you|Thanks|Many thanks][.|!| for that.]"), "You are welcome."),
    (wordings("[How are you|How do you do|Are you well][?|, then?| today?]"), "I am well, thank you."),
    (wordings("[Can you hear me|Are you there|Are you ready][?|, then?| now?]"), "Yes, I am here."),
    (wordings("[Wait a moment|One moment|Wait][.|, please.|, I am looking.]"), "Take your time."),
    (
        wordings("[What can you do|How can you help|What do you do][?| for me?|, then?]"),
        "I can answer questions about what you tell me.",
    ),
    (wordings("[Goodbye|Good night|See you][.|!| then.]"), "Goodbye."),
)
AFTER_DAY = wordings("[Which|What] day [comes after|follows|is after] {S}?")
AFTER_NUMBER = wordings("[Which|What] number [comes after|follows|is after] {S}?")
REPEAT = wordings("[Say|Repeat|Please say|Please repeat][|:] {S}", "[Say|Repeat] [this|the words]: {S}")
REPEATED = ("person", "town", "firm", "job", "colour", "drink", "goods", "code", "date", "number", "price")


def draw(drawer: Drawer) -> Turn:
    rng, split = drawer.rng, drawer.split
    which = rng.random()
    if which < 0.4:
        asked, answer = rng.choice(FIXED)
        return said(rng.choice(asked[split]), answer)
    if which < 0.5:
        return _next(rng, AFTER_DAY[split], DAYS)
    if which < 0.6:
        return _next(rng, AFTER_NUMBER[split], NUMBERS)
    what = Drawer(rng, split).draw(rng.choice(REPEATED))  # may be a name that was mentioned before
    return said(rng.choice(REPEAT[split]).replace("{S}", what), what)


def _next(rng: random.Random, asked: tuple[str, ...], names: tuple[str, ...]) -> Turn:
    at = rng.randrange(len(names) - 1)
    return said(rng.choice(asked).replace("{S}", names[at]), names[at + 1])
