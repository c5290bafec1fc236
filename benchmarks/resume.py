"""Time to the first token of prompts that resume at the token, against pages.

    python -m benchmarks.resume [--repeats 7] [--threads 2] [--small]

In turns, for prompts of several lengths that were answered before: the same prompt again, and the prompt with 1 to 128
new tokens, by an engine with tails and by one without. The same prompt's second token, whose step computes the open
chunk's recurrences, is a row of its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

from benchmarks import measure
from benchmarks.engines import MODEL, Model, ask, bench_checkpoint
from benchmarks.measure import Row, ratios
from headwater.config import ServeConfig
from headwater.engine.engine import Engine

LENGTHS, SMALL_LENGTHS = (530, 2078, 8222), (150,)  # tokens: 18 to 30 after a page
NEW, SMALL_NEW = (1, 8, 32, 128), (8,)  # tokens
MOST_MS = 15  # of the first token of a prompt that is sent again


@dataclass
class Resumed:
    """One prompt that an engine has answered."""

    model: Model
    engine: Engine
    prompt: list[int]
    rng: random.Random

    def again(self, token: int = 0) -> float:
        """Return the seconds until a token of the answer to the same prompt."""
        asked = ask(self.engine, self.prompt, 2)
        return asked.times[token] - asked.submitted

    def longer(self, count: int) -> float:
        """Return the seconds to the first token after new tokens."""
        return ask(self.engine, self.prompt + self.model.prompt(self.rng, count)).ttft


def rows_of(model: Model, engines: list[Engine], length: int, news: tuple[int, ...], repeats: int) -> list[Row]:
    """Return the rows of one length."""
    rng = random.Random(length)
    prompt = model.prompt(rng, length)
    for engine in engines:
        ask(engine, prompt, 2)
    tails, pages = (Resumed(model, engine, prompt, rng) for engine in engines)
    rows = []
    of_again = {"tails": tails.again, "pages": pages.again, "second": partial(tails.again, 1)}
    figures = measure.in_turns(of_again, repeats)
    name = f"{length:,} tokens again"
    rows += [
        Row(f"{name}: first token", "ms", [1e3 * s for s in figures["tails"]], f"<= {MOST_MS}"),
        Row(f"{name}: second token", "ms", [1e3 * s for s in figures["second"]]),
        Row(f"{name}: pages / tails", "x", ratios(figures["pages"], figures["tails"]), ">= 1"),
    ]
    for count in news:
        figures = measure.in_turns(
            {"tails": partial(tails.longer, count), "pages": partial(pages.longer, count)}, repeats
        )
        name = f"{count} new tokens after {length:,}"
        rows += [
            Row(f"{name}: first token", "ms", [1e3 * s for s in figures["tails"]]),
            Row(f"{name}: pages / tails", "x", ratios(figures["pages"], figures["tails"]), ">= 1"),
        ]
    return rows


def main() -> None:
    given = measure.options(__doc__, "resume", repeats=7)
    memory = 2 * 10**9
    with bench_checkpoint() as folder:
        model = Model(folder)
        with model.engines(tails=ServeConfig(memory=memory), pages=ServeConfig(memory=memory, tails=False)) as engines:
            lengths, news = (SMALL_LENGTHS, SMALL_NEW) if given.small else (LENGTHS, NEW)
            rows = [row for length in lengths for row in rows_of(model, engines, length, news, given.repeats)]
    measure.report(given, rows, model=MODEL, dtype="float32")


if __name__ == "__main__":
    main()
