"""Cost of caching for requests that cannot hit.

    python -m benchmarks.overhead [--repeats 5] [--threads 2] [--small]

Engines over one set of weights take turns: without a cache; with one in memory that nothing has touched yet; with one
whose memory is full, so that each request evicts. Cold: prompts never seen, up to the first token. Decode: from the
moment when all answers have begun until the engine is idle, so that what `--decode-reuse canonical` recomputes after
the answers counts too.
"""

from __future__ import annotations

import random
import time
from functools import partial

from benchmarks import measure
from benchmarks.engines import MODEL, Model, ask, bench_checkpoint, finished, settle, submit
from benchmarks.measure import Figures, Row, ratios
from headwater.config import ServeConfig
from headwater.engine.engine import Engine

COLD_LENGTHS, SMALL_COLD_LENGTHS = (2048, 8192), (256,)  # tokens
FULL = 3 * 10**8  # bytes of memory that are soon full
DECODE_PROMPT = 544  # tokens: half a page more than whole pages, as prompts are on average
DECODE_TOKENS, SMALL_DECODE_TOKENS = 192, 64
BATCHES = (1, 8)
COLD_LIMIT, DECODE_LIMIT, CANONICAL_POINTS = 1.03, 1.05, 0.02


NAMES = ("off", "new memory", "full memory")  # of the engines that get cold prompts


class ColdPrompts:
    """One prompt a repetition: every engine gets the same, and none has seen it."""

    def __init__(self, model: Model, length: int, seed: int) -> None:
        self._model, self._length, self._seed = model, length, seed
        self._asked: dict[int, int] = {}  # by engine

    def ttft(self, engine: Engine) -> float:
        turn = self._asked[id(engine)] = self._asked.get(id(engine), 0) + 1
        prompt = self._model.prompt(random.Random(f"{self._seed}, {self._length}, {turn}"), self._length)
        asked = ask(engine, prompt)
        assert asked.account is not None
        if asked.account.cached_tokens:
            raise RuntimeError(f"a prompt never seen had {asked.account.cached_tokens:,} tokens cached")
        return asked.ttft


def fill(model: Model, engine: Engine, config: ServeConfig, seed: int) -> None:
    """Prompts until checkpoints alone would take the memory twice."""
    rng = random.Random(seed)
    spec = model.loaded.spec
    for _ in range(2 * config.memory // (9 * spec.checkpoint_pages * spec.page_bytes)):
        ask(engine, model.prompt(rng, 640))


def cold_rows(model: Model, lengths: tuple[int, ...], repeats: int, seed: int) -> tuple[list[Row], list[float]]:
    """Also prefill's tokens/s without a cache, at the first length."""
    off, new, full = ServeConfig(cache=False), ServeConfig(), ServeConfig(memory=FULL)
    rows: list[Row] = []
    speed: list[float] = []
    with model.engines(off=off, new=new, full=full) as engines:
        fill(model, engines[2], full, seed + 1)
        for length in lengths:
            prompts = ColdPrompts(model, length, seed)
            work = {name: partial(prompts.ttft, engine) for name, engine in zip(NAMES, engines, strict=True)}
            figures = measure.in_turns(work, repeats)
            what = f"cold TTFT of {length:,} tokens"
            for name in NAMES[1:]:
                slower = ratios(figures[name], figures["off"])
                rows.append(Row(f"{what}, {name} / no cache", "x", slower, f"<= {COLD_LIMIT}"))
            rows.append(Row(f"{what}, no cache", "ms", [1e3 * s for s in figures["off"]]))
            speed = speed or [length / s for s in figures["off"]]
    return [*rows, Row(f"prefill, {lengths[0]:,} tokens, no cache", "tokens/s", speed)], speed


class Decode:
    """Answers of equal length, several at once."""

    def __init__(self, model: Model, batch: int, n_tokens: int, seed: int) -> None:
        self._model, self._batch, self._n_tokens = model, batch, n_tokens
        self._rng = random.Random(f"{seed}, {batch}")

    def speed(self, engine: Engine) -> float:
        """Tokens/s of all answers together."""
        prompts = [self._model.prompt(self._rng, DECODE_PROMPT) for _ in range(self._batch)]
        answers = [submit(engine, prompt, self._n_tokens) for prompt in prompts]
        for asked in answers:
            asked.first.wait()
        for asked in answers:
            finished(asked)
        settle(engine)
        end = time.perf_counter()
        begun = max(asked.times[0] for asked in answers)
        return sum(t > begun for asked in answers for t in asked.times) / (end - begun)


def decode_rows(model: Model, n_tokens: int, repeats: int, seed: int, prefill: float) -> list[Row]:
    settings = {"off": ServeConfig(cache=False)}
    settings |= {reuse: ServeConfig(decode_reuse=reuse) for reuse in ("none", "canonical")}
    rows: list[Row] = []
    with model.engines(**settings) as engines:
        for batch in BATCHES:
            decode = Decode(model, batch, n_tokens, seed)
            work = {name: partial(decode.speed, engine) for name, engine in zip(settings, engines, strict=True)}
            rows += _decode_rows(measure.in_turns(work, repeats), batch, prefill)
    return rows


def _decode_rows(speeds: Figures, batch: int, prefill: float) -> list[Row]:
    """Canonical pages cost a prefill of each decoded token: decode's speed over prefill's is the least."""
    off = Row(f"decode, batch {batch}, no cache", "tokens/s", speeds["off"])
    least = off.median / prefill
    slower = {name: ratios(speeds["off"], speeds[name]) for name in ("none", "canonical")}
    limit = 1 + least + CANONICAL_POINTS
    return [
        Row(f"decode, batch {batch}, no cache / decode-reuse none", "x", slower["none"], f"<= {DECODE_LIMIT}"),
        Row(f"decode, batch {batch}, no cache / canonical", "x", slower["canonical"], f"<= {limit:.3f}"),
        Row(f"decode / prefill tokens/s, batch {batch}", "x", [least]),
        off,
    ]


def main() -> None:
    given = measure.options(__doc__, "overhead", repeats=5)
    lengths = SMALL_COLD_LENGTHS if given.small else COLD_LENGTHS
    n_tokens = SMALL_DECODE_TOKENS if given.small else DECODE_TOKENS
    with bench_checkpoint() as folder:
        model = Model(folder)
        rows, speeds = cold_rows(model, lengths, given.repeats, given.seed)
        prefill = sorted(speeds)[len(speeds) // 2]
        rows += decode_rows(model, n_tokens, given.repeats, given.seed, prefill)
    measure.report(given, rows, model=MODEL, dtype="float32", decode_tokens=n_tokens)


if __name__ == "__main__":
    main()
