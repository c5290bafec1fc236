"""Speed on a card: cold prompts, hits and answers, beside the speed at which the card copies memory.

    python -m benchmarks.card --model FOLDER [--device cuda] [--tokens 2048,32768] [--streams 1,8,32] [--small]

Times are those of requests through the engine. A hit's prompt is a cached prefix and 256 tokens that are new. Answers
are decoded with recorded steps and without them, greedily, and drawn with the settings that Qwen3.5 recommends.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import measure
from benchmarks.decode import Streams, memory_for, step_bytes
from benchmarks.engines import Asked, Model, ask, bench_checkpoint, sent, submit
from benchmarks.measure import Row, ratios
from headwater.config import DTYPES, ServeConfig
from headwater.engine.engine import Engine
from headwater.request import Generation, SamplingParams

SUFFIX = 256  # new tokens after a cached prefix
CONTEXT = 2048  # tokens before an answer
COPIED = 2**30  # bytes
DRAWN = {"temperature": 0.7, "top_p": 0.95, "top_k": 20}


@dataclass
class Prompts:
    """Prompts of one length to one engine, timed to their first tokens."""

    model: Model
    engine: Engine
    n_tokens: int
    rng: random.Random

    def cold(self) -> float:
        return ask(self.engine, self.model.prompt(self.rng, self.n_tokens)).ttft

    def hit(self) -> float:
        prefix = self.model.prompt(self.rng, self.n_tokens)
        ask(self.engine, prefix)
        asked = ask(self.engine, prefix + self.model.prompt(self.rng, SUFFIX))
        assert asked.account is not None
        if asked.account.cached_tokens < self.n_tokens - self.engine.spec.page_size:
            raise RuntimeError(f"a cached prefix was computed again: {asked.account}")
        return asked.ttft


def drawn(engine: Engine, prompt: list[int], max_tokens: int) -> Asked:
    """Submit a request whose answer is drawn."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **DRAWN)
    return sent(engine, Generation(tuple(prompt), params))


def copy_rate(device: str) -> Callable[[], float]:
    """Return a function that copies memory on the device, and returns GB/s, read and written."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def rate() -> float:
        wait(device)
        begun = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        wait(device)
        return 4 * 2 * COPIED / (time.perf_counter() - begun) / 1e9

    return rate


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def prompt_rows(model: Model, config: ServeConfig, tokens: tuple[int, ...], repeats: int) -> Iterator[Row]:
    with model.engines(only=config) as (engine,):
        for n in tokens:
            prompts = Prompts(model, engine, n, random.Random(n))
            figures = measure.in_turns({"cold": prompts.cold, "hit": prompts.hit}, repeats)
            yield Row(f"cold prompt of {n:,} tokens", "tokens/s", [n / s for s in figures["cold"]])
            yield Row(f"first token of it, {n:,} tokens cold", "s", figures["cold"])
            yield Row(f"first token of {SUFFIX} tokens after {n:,} cached ones", "s", figures["hit"])
            yield Row(f"cold / hit, {n:,} tokens", "x", ratios(figures["cold"], figures["hit"]))


def answer_rows(
    model: Model, config: ServeConfig, streams: tuple[int, ...], outputs: int, given: Given
) -> Iterator[Row]:
    spec, rng = model.loaded.spec, random.Random(0)
    prompts = [model.prompt(rng, given.context) for _ in range(max(streams))]
    with model.engines(recorded=config, eager=config) as (recorded, eager):
        eager.runner.graphs = None
        ways = (("recorded", recorded, submit), ("eager", eager, submit), ("drawn", recorded, drawn))
        work = {
            f"{name} {n}": Streams(engine, prompts[:n], outputs, how).rate
            for name, engine, how in ways
            for n in streams
        }
        figures = measure.in_turns(work | {"copy": copy_rate(config.device)}, given.repeats)
    yield Row("copy of memory, read and written", "GB/s", figures["copy"])
    for n in streams:
        rates = figures[f"recorded {n}"]
        name = f"{n} stream{'s' * (n > 1)} after {given.context:,} tokens"
        yield Row(f"answers, {name}", "tokens/s", rates)
        yield Row(f"drawn answers, {name}", "tokens/s", figures[f"drawn {n}"])
        yield Row(f"recorded / eager, {name}", "x", ratios(rates, figures[f"eager {n}"]))
        read = [step_bytes(spec, n, given.context + outputs / 2) / 1e9 * rate / n for rate in rates]
        yield Row(f"read by steps / copy, {name}", "x", ratios(read, figures["copy"]))


@dataclass(frozen=True)
class Given:
    """Sizes of a run."""

    context: int
    repeats: int


def main() -> None:
    parser = measure.parser(__doc__, "card", repeats=3)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; without it, a small random one")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--tokens", type=measure.numbers, default=(2048, 8192, 32768), help="of prompts")
    parser.add_argument("--streams", type=measure.numbers, default=(1, 8, 32))
    parser.add_argument("--outputs", type=int, default=256, help="tokens of an answer")
    given = measure.prepared(parser)
    context = CONTEXT
    if given.small:
        given.tokens, given.streams, given.outputs, context = (128,), (1, 2), 8, 64
    with ExitStack() as stack:
        folder = given.model or stack.enter_context(bench_checkpoint())
        model = Model(folder, given.dtype, device=given.device)
        spec = model.loaded.spec
        most = max(8 * max(given.tokens), max(given.streams) * (context + given.outputs))
        config = ServeConfig(
            memory=memory_for(spec, most),
            device=given.device,
            max_running=max(given.streams),
        )
        rows = list(prompt_rows(model, config, given.tokens, given.repeats))
        rows += answer_rows(model, config, given.streams, given.outputs, Given(context, given.repeats))
    name = torch.cuda.get_device_name() if given.device == "cuda" else "none"
    measure.report(
        given, rows, card=name, model=str(folder), dtype=given.dtype, deterministic=model.check.broken_by or "yes"
    )


if __name__ == "__main__":
    main()
