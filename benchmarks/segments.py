"""Savings of segments: HYPIC's figures 12 and 11 on this engine.

    python -m benchmarks.segments [hypic-12] [hypic-11] [--repeats 5] [--threads 2] [--small] [--out docs/results]

Prompts are a leading part, documents and a question. For hypic-12 every document was stored before, and no two prompts
have the same first one, so a prefix cache finds the leading part alone. Ways take turns. Writes what `python -m
papers` would.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from benchmarks import measure
from benchmarks.engines import Asked, Model, bench_checkpoint, finished, params, sent, settle
from headwater.cli.common import prepare_outputs
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.mixers.numerics import prepare_process
from headwater.request import Fidelity, Generation, Span
from papers import FIGURES
from papers.figure import Found
from papers.hypic.measured import HYPIC, PREFIX, RECOMPUTE, Loaded, Ttft, alone, under_load
from papers.lab import Lab, document, write
from papers.results import refuse_dirty_tree

LEADING, QUESTION = 64, 32  # tokens
SIZES, SMALL_SIZES = ((4, 1024), (4, 2048), (4, 4096), (8, 1024), (16, 1024)), ((2, 64), (2, 128), (4, 64))
FIDELITIES = {HYPIC: Fidelity.FAST}


@dataclass(frozen=True)
class Prompts:
    """Prompts with a common leading part and documents of one size."""

    leading: list[int]
    documents: list[list[int]]
    model: Model
    rng: random.Random

    @classmethod
    def drawn(cls, model: Model, documents: int, tokens: int, seed: str) -> Prompts:
        rng = random.Random(seed)
        made = [model.prompt(rng, tokens) for _ in range(documents)]
        return cls(model.prompt(rng, LEADING), made, model, rng)

    def of(self, chosen: list[int], way: str, salt: str, answer: int = 1) -> Generation:
        """A question about those documents. Each way has a namespace of its own, full recompute one a prompt."""
        prompt, spans = list(self.leading), []
        for number in chosen:
            spans.append(Span(len(prompt), len(prompt) + len(self.documents[number])))
            prompt += self.documents[number]
        prompt += self.model.prompt(self.rng, QUESTION)
        namespace = f"{salt}, {way}" + (f", {self.rng.random()}" if way == RECOMPUTE else "")
        segmented = {"segments": tuple(spans), "fidelity": FIDELITIES[way]} if way in FIDELITIES else {}
        return Generation(tuple(prompt), params(answer), namespace, **segmented)


def measure_size(model: Model, engine: Engine, size: tuple[int, int], repeats: int, seed: int) -> Ttft:
    """Each prompt begins with a document that began none before; the others come in any order."""
    n, tokens = size
    prompts = Prompts.drawn(model, n + repeats + 1, tokens, f"{seed}, {size}")
    elsewhere = replace(prompts, leading=model.prompt(prompts.rng, LEADING))  # so that no prefix of it is found
    for way in FIDELITIES:
        for number in range(len(prompts.documents)):
            _answered(engine, elsewhere.of([number], way, str(size)))
    first = {way: iter(range(len(prompts.documents))) for way in (RECOMPUTE, PREFIX, *FIDELITIES)}

    def ask(way: str) -> float:
        begin = next(first[way])
        others = [number for number in range(len(prompts.documents)) if number != begin]
        asked = _answered(engine, prompts.of([begin, *prompts.rng.sample(others, n - 1)], way, str(size)))
        _expect(asked, way, n)
        return asked.ttft

    work: Mapping[str, Callable[[], float]] = {way: lambda way=way: ask(way) for way in first}  # type: ignore[misc]
    return Ttft(n, tokens, measure.in_turns(work, repeats))


def _answered(engine: Engine, generation: Generation) -> Asked:
    asked = finished(sent(engine, generation))
    settle(engine)
    return asked


def _expect(asked: Asked, way: str, segments: int) -> None:
    """Raises RuntimeError where a way did not do what its name says."""
    account = asked.account
    assert account is not None
    most = {RECOMPUTE: 0, PREFIX: LEADING}.get(way, account.cached_tokens)
    if account.segments != (segments if way in FIDELITIES else 0) or account.cached_tokens > most:
        raise RuntimeError(f"{way} of {segments} segments: {account}")


# -- load

POOL, CHOSEN, TOKENS, CLIENTS, REQUESTS, ANSWER, ZIPF = 64, 4, 512, 8, 10, 16, 1.0
SMALL_LOAD_TOKENS, SMALL_REQUESTS = 64, 2


def measure_load(model: Model, engine: Engine, repeats: int, seed: int, small: bool) -> dict[str, list[Loaded]]:
    runs: dict[str, list[Loaded]] = {PREFIX: [], HYPIC: []}
    for repeat in range(repeats):
        for way in list(runs)[:: -1 if repeat % 2 else 1]:
            runs[way].append(load(model, engine, way, f"{seed}, {repeat}", small))
    return runs


def load(model: Model, engine: Engine, way: str, salt: str, small: bool) -> Loaded:
    """All clients at once, each asking its next question when it has the answer to the one before."""
    prompts = Prompts.drawn(model, POOL, SMALL_LOAD_TOKENS if small else TOKENS, salt)
    asked = SMALL_REQUESTS if small else REQUESTS
    weights = list(accumulate((rank + 1) ** -ZIPF for rank in range(POOL)))
    work = [[prompts.of(chosen(prompts.rng, weights), way, salt, ANSWER) for _ in range(asked)] for _ in range(CLIENTS)]
    begin = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda mine: [finished(sent(engine, one)) for one in mine], work))
    seconds = time.perf_counter() - begin
    settle(engine)
    return Loaded(
        [one.ttft for mine in answers for one in mine], seconds, sum(len(one.prompt) for mine in work for one in mine)
    )


def chosen(rng: random.Random, weights: list[float]) -> list[int]:
    """Different documents, by popularity, in any order."""
    found: set[int] = set()
    while len(found) < CHOSEN:
        found.add(rng.choices(range(POOL), cum_weights=weights)[0])
    return rng.sample(sorted(found), CHOSEN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=["hypic-12", "hypic-11", []], metavar="NAME")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    given = parser.parse_args()
    prepare_outputs(folders=[given.out])
    refuse_dirty_tree(given.out, small=given.small)
    prepare_process(given.threads)
    begun = measure.cpu_seconds()
    config = ServeConfig(memory=6 * 10**9)
    with bench_checkpoint() as folder:
        model = Model(folder)

        def alone_found() -> Found:
            sizes = SMALL_SIZES if given.small else SIZES
            with model.engines(only=config) as (engine,):
                return alone([measure_size(model, engine, size, given.repeats, given.seed) for size in sizes])

        def load_found() -> Found:
            with model.engines(only=config) as (engine,):
                return under_load(measure_load(model, engine, given.repeats, given.seed, given.small))

        work: dict[str, Callable[[], Found]] = {"hypic-12": alone_found, "hypic-11": load_found}
        for name, run in work.items():
            if given.names and name not in given.names:
                continue
            started = time.perf_counter()
            written = document(FIGURES[name], Lab(seed=given.seed), run(), time.perf_counter() - started)
            write(written, given.out, small=given.small)
            print(name)
            for row in written["rows"]:
                print(f"  {row['label']}: {row['ours']:.4g} {row['unit']}")
            for shape in written["shapes"]:
                print(f"  {shape['says']}: {shape['holds']}")
    print(f"{measure.busy_with_others(begun)} cores were busy with other processes")


if __name__ == "__main__":
    main()
