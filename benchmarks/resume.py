"""Time to the first token of prompts that resume at the token, against pages; time of short legs.

    python -m benchmarks.resume [--repeats 7] [--threads 2] [--only prompts|legs|layers] [--small]

*prompts*: in turns, for prompts of several lengths that were answered before: the same prompt again, and the prompt
with 1 to 128 new tokens, by an engine with tails and by one without. The same prompt's second token, whose step
computes the open chunk's recurrences, is a row of its own.

*legs*: steps with one leg of 1 to 32 rows after a tail, for each format of weights, against their parts: a step with a
leg of as many rows from a page, and the recurrences of the tail's tokens. *layers*: the same for single layers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from benchmarks import measure
from benchmarks.engines import MODEL, RECIPE, Model, ask, bench_checkpoint
from benchmarks.layer_steps import KINDS, Kind
from benchmarks.measure import Row, ratios, timed
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.schedule.sequence import Purpose
from headwater.schedule.step import Step
from tests.exactness.formats import stored

LENGTHS, SMALL_LENGTHS = (530, 2078, 8222), (150,)  # tokens: 18 to 30 after a page
NEW, SMALL_NEW = (1, 8, 32, 128), (8,)  # tokens
MOST_MS = 15  # of the first token of a prompt that is sent again
LEGS, SMALL_LEGS = (1, 4, 8, 16, 32), (1,)  # rows
LEG_PAGE, LEG_KEPT = 512, 18  # tokens: position of the checkpoint before a leg, and length of the tail
MAX_LEG_RATIO = 1.1  # of a leg after a tail to its parts
# dtype and format of weights
FORMATS = (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8"), ("bfloat16", "int4"), ("bfloat16", "fp8"))
LAYER_KINDS = ("Gated DeltaNet", "KDA", "Mamba-2", "Mamba-1", "Lightning", "window of 1,024")


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


def prompts_rows(small: bool, repeats: int) -> Iterator[Row]:
    """Yield the rows of prompts."""
    lengths, news = (SMALL_LENGTHS, SMALL_NEW) if small else (LENGTHS, NEW)
    with bench_checkpoint() as folder, both_engines(model := Model(folder)) as engines:
        for length in lengths:
            yield from rows_of(model, engines, length, news, repeats)


@contextmanager
def both_engines(model: Model) -> Iterator[list[Engine]]:
    """Run an engine with tails and one without."""
    memory = 2 * 10**9
    with model.engines(tails=ServeConfig(memory=memory), pages=ServeConfig(memory=memory, tails=False)) as engines:
        yield engines


class LegTimes:
    """Seconds of the last step of an engine that had a leg of a prompt: until its logits, and after its token."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.until_logits, self.after_token = engine, 0.0, 0.0
        self._run, self._end, self._has_prompt = engine.runner.run, engine.runner.end_step, False
        engine.runner.run, engine.runner.end_step = self._timed_run, self._timed_end  # type: ignore[method-assign]

    def _timed_run(self, step: Step) -> torch.Tensor:
        start = perf_counter()
        logits_RV = self._run(step)
        self._has_prompt = any(leg.seq.purpose is Purpose.PROMPT for leg in step.legs)
        if self._has_prompt:
            self.until_logits = perf_counter() - start
        return logits_RV

    def _timed_end(self) -> None:
        seconds = timed(self._end)()
        if self._has_prompt:
            self.after_token = seconds

    def of(self, model: Model, rng: random.Random, prompt: list[int], count: int) -> float:
        """Return the seconds until the logits of the leg of new tokens after a prompt."""
        ask(self.engine, prompt + model.prompt(rng, count))
        return self.until_logits

    def recurrences(self, prompt: list[int]) -> float:
        """Return the seconds of the recurrences of the tail of a prompt that is sent again."""
        ask(self.engine, prompt, 2)
        return self.after_token


def legs_rows(small: bool, repeats: int) -> Iterator[Row]:
    """Yield the rows of legs, for each format of weights."""
    for dtype, form in FORMATS[:1] if small else FORMATS:
        with TemporaryDirectory() as root:
            folder, weights = stored(Path(root), RECIPE, form)
            with both_engines(model := Model(folder, dtype, weights)) as engines:
                rng = random.Random(0)
                prompt = model.prompt(rng, LEG_PAGE + LEG_KEPT)
                for engine in engines:
                    ask(engine, prompt, 2)
                tails, pages = map(LegTimes, engines)
                for n in SMALL_LEGS if small else LEGS:
                    parts = {
                        "leg": partial(tails.of, model, rng, prompt, n),
                        "page": partial(pages.of, model, rng, prompt[:LEG_PAGE], n),
                        "recurrences": partial(tails.recurrences, prompt),
                    }
                    yield from leg_rows(f"{dtype}, {form}", n, measure.in_turns(parts, repeats))


def leg_rows(name: str, n: int, seconds: measure.Figures) -> list[Row]:
    """Return the rows of one leg: its time, and its ratio to that of its parts."""
    parts = list(map(sum, zip(seconds["page"], seconds["recurrences"], strict=True)))
    name = f"{name}, {n} row{'s' * (n > 1)}"
    return [
        Row(f"{name} after a tail", "ms", [1e3 * s for s in seconds["leg"]]),
        Row(
            f"{name}: leg / its parts",
            "x",
            ratios(seconds["leg"], parts),
            f"<= {MAX_LEG_RATIO}",
        ),
    ]


@torch.inference_mode()
def layers_rows(small: bool, repeats: int) -> Iterator[Row]:
    """Yield the rows of single layers in float32."""
    for name in LAYER_KINDS[:1] if small else LAYER_KINDS:
        kind = Kind.of(KINDS[name], 10**6 if small else 10**8, torch.float32)
        for n in SMALL_LEGS if small else LEGS:
            steps = {
                "leg": kind.leg(LEG_PAGE, LEG_KEPT, n),
                "page": kind.leg(LEG_PAGE, 0, n),
                "recurrences": kind.leg(LEG_PAGE, LEG_KEPT, 0),
            }
            seconds = measure.in_turns({part: timed(step) for part, step in steps.items()}, repeats)
            each = {part: [s / len(kind.functions) for s in of] for part, of in seconds.items()}
            yield from leg_rows(name, n, each)


PARTS = {"prompts": prompts_rows, "legs": legs_rows, "layers": layers_rows}


def main() -> None:
    parser = measure.parser(__doc__, "resume", repeats=7)
    parser.add_argument("--only", choices=PARTS, help="one part of the rows")
    given = measure.prepared(parser)
    parts = [PARTS[given.only]] if given.only else PARTS.values()
    rows = [row for part in parts for row in part(given.small, given.repeats)]
    measure.report(given, rows, model=MODEL, dtype="float32")


if __name__ == "__main__":
    main()
