"""Cost of the guards that make the bits of a row independent of its batch.

    python -m benchmarks.guards [--repeats 7] [--threads 2] [--small]

Two servers without a cache take turns, one as it is, one with `--no-reproducible` and MKL left to itself.
"""

from __future__ import annotations

import random
from functools import partial

from benchmarks import measure
from benchmarks.engines import MODEL, Model, bench_checkpoint
from benchmarks.measure import Figures, Row, ratios
from benchmarks.servers import complete, serve

PROMPT, DECODE_PROMPT = 2048, 512  # tokens
DECODE_TOKENS = 64
BATCHES = (1, 8)
LIMIT = 1.03
UNGUARDED = {"MKL_CBWR": "AUTO"}


class Prompts:
    """The same ones for both servers; neither keeps them."""

    def __init__(self, model: Model, seed: int, small: bool) -> None:
        rng = random.Random(seed)
        self._prompt = model.prompt(rng, PROMPT // 8 if small else PROMPT)
        self._eight = [model.prompt(rng, DECODE_PROMPT // 8 if small else DECODE_PROMPT) for _ in range(max(BATCHES))]
        self._n_tokens = DECODE_TOKENS // 8 if small else DECODE_TOKENS

    def ttft(self, port: int) -> float:
        return complete(port, self._prompt).ttft

    def decode(self, port: int, batch: int) -> float:
        """Seconds a step, once all answers have begun."""
        times = complete(port, self._eight[:batch], self._n_tokens).times.values()
        begun = max(of_choice[0] for of_choice in times)
        later = sorted(t for of_choice in times for t in of_choice if t > begun)
        return (later[-1] - begun) / len(later) * batch


def rows_of(figures: Figures) -> list[Row]:
    rows = []
    for name in ("TTFT", *(f"decode step, batch {batch}" for batch in BATCHES)):
        guarded, free = figures[f"{name}, guarded"], figures[f"{name}, unguarded"]
        rows.append(Row(f"{name}, guarded / unguarded", "x", ratios(guarded, free), f"<= {LIMIT}"))
        rows.append(Row(f"{name}, guarded", "ms", [1e3 * s for s in guarded]))
    return rows


def main() -> None:
    given = measure.options(__doc__, "guards", repeats=7)
    with bench_checkpoint() as folder:
        prompts = Prompts(Model(folder), given.seed, given.small)
        common = [str(folder), "--no-cache", "--memory", "1GB", "--threads", str(given.threads)]
        with serve(*common) as guarded, serve(*common, "--no-reproducible", environment=UNGUARDED) as unguarded:
            work = {}
            for name, serving in (("guarded", guarded), ("unguarded", unguarded)):
                work[f"TTFT, {name}"] = partial(prompts.ttft, serving.port)
                for batch in BATCHES:
                    work[f"decode step, batch {batch}, {name}"] = partial(prompts.decode, serving.port, batch)
            figures = measure.in_turns(work, given.repeats)
    measure.report(given, rows_of(figures), model=MODEL, dtype="float32")


if __name__ == "__main__":
    main()
