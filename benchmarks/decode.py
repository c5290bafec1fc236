"""Speed of decoding through the engine, beside the speed at which the machine reads memory.

    python -m benchmarks.decode [--model FOLDER] [--threads 2] [--streams 1,8] [--context 512,8192] [--small]

Several streams decode at once after distinct prompts, which are cached: prefill is not counted. A step reads all
weights as they are held (`--weights`; of routed experts, those that are expected to be chosen), and the states and KV
of each stream. The plain read is a sum over 1 GiB with as many threads, in turns with the streams.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks import measure
from benchmarks.engines import Asked, Model, ask, bench_checkpoint, finished, settle, submit
from benchmarks.measure import Row, ratios
from headwater.config import DTYPES, WEIGHTS, ServeConfig
from headwater.engine.engine import Engine
from headwater.spec import ModelSpec

READ, SMALL_READ = 2**30, 2**24  # bytes of the plain read
READS = 3  # the fastest counts
BEYOND_CACHES = 10**8  # bytes: weights of fewer may stay in a processor's caches
GOALS = {"int8": ">= 0.6", "int4": ">= 0.4"}  # share of the plain read, by the format of weights; otherwise:
GOAL = ">= 0.8"
ROOM = 2  # times the bytes of all streams, for the cache


@dataclass(frozen=True)
class Streams:
    """Answers of equal length after distinct prompts."""

    engine: Engine
    prompts: list[list[int]]
    n_outputs: int
    ask: Callable[[Engine, list[int], int], Asked] = submit

    def rate(self) -> float:
        """Output tokens a second of all streams together, while all of them run."""
        for prompt in self.prompts:
            ask(self.engine, prompt)  # cached from the first turn on
        answers = [self.ask(self.engine, prompt, self.n_outputs) for prompt in self.prompts]
        for asked in answers:
            finished(asked)
        settle(self.engine)
        for asked in answers:
            assert asked.account is not None
            if asked.account.cached_tokens < asked.account.prompt_tokens - self.engine.spec.page_size:
                raise RuntimeError(f"a cached prompt was computed again: {asked.account}")
        begun, end = max(asked.times[0] for asked in answers), min(asked.times[-1] for asked in answers)
        return sum(begun < t <= end for asked in answers for t in asked.times) / (end - begun)


def plain_read(n_bytes: int) -> Callable[[], float]:
    """Return a function that sums so many bytes and returns GB/s."""
    numbers = torch.ones(n_bytes // 4)
    seconds = measure.timed(numbers.sum)
    return lambda: n_bytes / min(seconds() for _ in range(READS)) / 1e9


def weight_bytes(spec: ModelSpec, streams: int) -> float:
    """Bytes of weights that a step over one token of each stream reads: of layers, and of the head."""
    return spec.weight_bytes_read(streams) + spec.hidden_size * spec.vocab_size * spec.element_bytes


def step_bytes(spec: ModelSpec, streams: int, context: float) -> float:
    """Bytes of weights, states and KV that a step reads when each stream has so many tokens."""
    return weight_bytes(spec, streams) + streams * (spec.checkpoint_bytes + context * spec.kv_bytes_per_token)


def memory_for(spec: ModelSpec, tokens: int) -> int:
    """Bytes of cache for so many tokens in all, with a checkpoint each 512 tokens or more."""
    needed = tokens * spec.kv_bytes_per_token + (tokens // 512 + 64) * spec.checkpoint_bytes
    return max(ServeConfig().memory, ROOM * needed)


def rows_at(model: Model, context: int, n_streams: tuple[int, ...], n_outputs: int, read: int, turns: int) -> list[Row]:
    spec, rng, most = model.loaded.spec, random.Random(context), max(n_streams)
    config = ServeConfig(memory=memory_for(spec, most * (context + n_outputs)))
    prompts = [model.prompt(rng, context) for _ in range(most)]
    with model.engines(only=config) as (engine,):
        work = {str(n): Streams(engine, prompts[:n], n_outputs).rate for n in n_streams}
        figures = measure.in_turns(work | {"read": plain_read(read)}, turns)
    rows = [Row(f"plain read, beside contexts of {context:,}", "GB/s", figures["read"])]
    for n in n_streams:
        name = f"{n} stream{'s' * (n > 1)} after {context:,} tokens"
        read_GB = step_bytes(spec, n, context + n_outputs / 2) / 1e9
        speeds = [read_GB * rate / n for rate in figures[str(n)]]
        goal = GOALS.get(spec.weights_held, GOAL) if n == 1 and weight_bytes(spec, n) >= BEYOND_CACHES else ""
        rows += [
            Row(f"decode, {name}", "tokens/s", figures[str(n)]),
            Row(f"bytes that a step reads, {name}", "MB", [1e3 * read_GB]),
            Row(f"read by steps, {name}", "GB/s", speeds),
            Row(f"read by steps / plain read, {name}", "x", ratios(speeds, figures["read"]), goal),
        ]
    return rows


def main() -> None:
    parser = measure.parser(__doc__, "decode", repeats=3)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; without it, a random one")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--weights", default="auto", choices=WEIGHTS)
    parser.add_argument("--streams", type=measure.numbers, default=(1, 8))
    parser.add_argument("--context", type=measure.numbers, default=(512, 8192), help="tokens of a prompt")
    parser.add_argument("--outputs", type=int, default=256, help="tokens of an answer")
    given = measure.prepared(parser)
    if given.small:
        given.context, given.outputs = (128,), 16
    with ExitStack() as stack:
        folder = given.model or stack.enter_context(bench_checkpoint())
        model = Model(folder, given.dtype, given.weights)
        read = SMALL_READ if given.small else READ
        at = partial(rows_at, model, n_streams=given.streams, n_outputs=given.outputs, read=read, turns=given.repeats)
        rows = [row for context in given.context for row in at(context)]
    spec, name = model.loaded.spec, given.model.name if given.model else "random"
    measure.report(given, rows, model=name, dtype=spec.dtype_name, weights=spec.weights_held)


if __name__ == "__main__":
    main()
