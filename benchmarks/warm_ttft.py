"""Overhead of a warm request over the work that remains to be computed.

    python -m benchmarks.warm_ttft [--repeats 7] [--threads 2] [--small]

For each length of a cached prefix, in turns: a prefill of the suffix called on the runner directly, the prefix's KV and
state in place; the same through the engine; the same as text over HTTP on loopback, less the time that its tokenisation
takes alone. The first two runs of a length are cold ones of the whole prompt.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from functools import partial

from benchmarks import measure
from benchmarks.engines import MODEL, Model, ask, bench_checkpoint, settle
from benchmarks.measure import Row, ratios
from benchmarks.servers import ServerThread, complete
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.plan import Draft
from headwater.request import Generation, SamplingParams
from headwater.schedule.kinds.request import Request
from headwater.schedule.limits import EXTRA_SLOTS
from headwater.schedule.sequence import key_of
from headwater.schedule.step import Leg, Step
from headwater.server.prompt.encoding import encode

PREFIXES, SMALL_PREFIXES = (2048, 8192, 32768), (512, 1024)  # tokens
SUFFIX = 256  # tokens
COLD_RUNS = 2
LIMIT = 1.1


@dataclass
class Warm:
    """One prefix that the engine has seen, and the ways of computing what follows it."""

    model: Model
    engine: Engine
    port: int
    prefix: list[int]
    rng: random.Random

    def prompt(self) -> list[int]:
        return self.prefix + self.model.prompt(self.rng, SUFFIX)

    def direct(self) -> float:
        """Seconds of the forward pass over a suffix, with its batch built and its token chosen."""
        engine, prompt, start = self.engine, self.prompt(), len(self.prefix)
        settle(engine)
        cache, runner = engine.scheduler.cache, engine.runner
        draft = Draft(
            0, "", key_of(prompt), start, len(prompt), slot=True, publish=start
        )  # the engine's ids begin at 1
        plan = cache.reserve(draft)
        seq = Request(0, Generation(tuple(prompt), SamplingParams()))
        seq.slot = engine.scheduler.limits.max_running + EXTRA_SLOTS - 1
        runner.states.restore(seq.slot, runner.arena.pages, plan.restore)
        step = Step((Leg(seq, replace(plan, restore=())),), ())
        begun = time.perf_counter()
        runner.run(step).argmax(-1).tolist()
        seconds = time.perf_counter() - begun
        cache.abandon(plan)
        cache.release(0)
        return seconds

    def through_engine(self) -> float:
        asked = ask(self.engine, self.prompt())
        assert asked.account is not None
        self._expect(asked.account.cached_tokens)
        return asked.ttft

    def through_http(self) -> float:
        """TTFT of a text prompt, less what its tokenisation takes."""
        prompt = self.prompt()
        text = self.model.loaded.tokenizer.decode(prompt, skip_special_tokens=False)
        begun = time.perf_counter()
        ids = encode(self.model.loaded.tokenizer, text, add_special_tokens=True).ids
        tokenising = time.perf_counter() - begun
        if ids != prompt:
            raise RuntimeError(f"a text of {len(prompt):,} tokens came back as {len(ids):,} others")
        answer = complete(self.port, text)
        settle(self.engine)
        self._expect(answer.account["cached_tokens"])
        return answer.ttft - tokenising

    def _expect(self, cached: int) -> None:
        if cached != len(self.prefix):
            raise RuntimeError(f"a prefix of {len(self.prefix):,} tokens was to be cached, {cached:,} were")


def cold(model: Model, engine: Engine, length: int, rng: random.Random) -> tuple[list[int], float]:
    """A prefix with a checkpoint at its end, and the TTFT of the prompt of it and one more token."""
    prefix = model.prompt(rng, length)
    asked = ask(engine, [*prefix, prefix[0]])
    if asked.account is None or asked.account.cached_tokens:
        raise RuntimeError(f"a prompt never seen was no cold one: {asked.account}")
    return prefix, asked.ttft


def measure_prefix(model: Model, engine: Engine, port: int, length: int, repeats: int, seed: int) -> list[Row]:
    rng = random.Random(f"{seed}, {length}")
    runs = [cold(model, engine, length, rng) for _ in range(COLD_RUNS)]
    warm = Warm(model, engine, port, runs[-1][0], rng)
    work = {"direct": warm.direct, "engine": warm.through_engine, "http": warm.through_http}
    figures = measure.in_turns(work, repeats)
    name = f"{length:,} + {SUFFIX} tokens"
    colds, goal = [ttft for _, ttft in runs], f"<= {LIMIT}"
    beyond = {way: ratios(figures[way], figures["direct"]) for way in ("engine", "http")}
    return [
        Row(f"warm TTFT / direct prefill, engine, {name}", "x", beyond["engine"], goal),
        Row(f"(warm TTFT - tokenising) / direct, HTTP, {name}", "x", beyond["http"], goal),
        Row(f"direct prefill, {name}", "ms", [1e3 * s for s in figures["direct"]]),
        Row(f"warm TTFT less tokenising, HTTP, {name}", "ms", [1e3 * s for s in figures["http"]]),
        Row(f"cold TTFT, {name}", "ms", [1e3 * s for s in colds]),
        Row(f"cold TTFT / warm TTFT, engine, {name}", "x", [min(colds) / s for s in figures["engine"]]),
    ]


def main() -> None:
    given = measure.options(__doc__, "warm_ttft", repeats=7)
    config = ServeConfig(memory=2 * 10**9)
    with bench_checkpoint() as folder:
        model = Model(folder)
        with model.engines(only=config) as (engine,), ServerThread(engine, config) as server:
            one = partial(measure_prefix, model, engine, server.port, repeats=given.repeats, seed=given.seed)
            rows = [row for length in (SMALL_PREFIXES if given.small else PREFIXES) for row in one(length)]
    measure.report(given, rows, model=MODEL, dtype="float32")


if __name__ == "__main__":
    main()
