"""Speed of prefill and decode, and of prefill against transformers on the same checkpoint.

    python -m benchmarks.prefill [--repeats 5] [--threads 2] [--small]

All sides run in turns within one process, in float32 and in bfloat16.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import measure
from benchmarks.engines import MODEL, Model, bench_checkpoint
from benchmarks.measure import Row, ratios, timed
from headwater.models.load import LoadedModel
from tests import checkpoints
from tests.support import Bench

DTYPES = ("float32", "bfloat16")
PROMPT, SMALL_PROMPT = 2048, 128  # tokens
CONTEXTS, SMALL_CONTEXTS = (512, 8192), (64,)  # tokens
BATCHES = (1, 8)
DECODE_STEPS = 16
PREFILL_LIMIT, DECODE_LIMIT = 1.5, 4  # times transformers; times the rate of batch 1


def prefill_work(loaded: LoadedModel, folder: Path, tokens: list[int]) -> dict[str, Callable[[], object]]:
    """A cold prefill that ends in one row of logits, here and in transformers."""
    oracle = checkpoints.recipe.oracle(folder, getattr(torch, loaded.spec.dtype_name))
    batch = torch.tensor([tokens])
    bench = Bench(loaded.model, n_pages=len(tokens) // 64 + 2)
    seq = bench.sequence(len(tokens))

    def ours() -> torch.Tensor:
        seq.length = 0
        bench.states.zero(seq.slot)
        return bench.step([(seq, tokens)])

    def theirs() -> torch.Tensor:
        with torch.inference_mode():
            return oracle(batch, logits_to_keep=1).logits

    return {"headwater": ours, "transformers": theirs}


def decode_work(loaded: LoadedModel, tokens: list[int], sizes: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """`DECODE_STEPS` steps at each batch size, always from the same context length."""
    pages = len(tokens) // 64 + 2
    bench = Bench(loaded.model, n_pages=max(sizes) * pages)
    seqs = [bench.sequence(len(tokens) + DECODE_STEPS + 1) for _ in range(max(sizes))]
    first = seqs[0]
    bench.step([(first, tokens)])
    for seq in seqs[1:]:  # the same text: a copy is as good as a prefill
        bench.arena.pages[seq.table] = bench.arena.pages[first.table]
        bench.states.bytes_RB[seq.slot] = bench.states.bytes_RB[first.slot]
        seq.length = first.length

    def run(size: int) -> None:
        for _ in range(DECODE_STEPS):
            bench.step([], [(seq, tokens[0]) for seq in seqs[:size]])
        for seq in seqs[:size]:
            seq.length -= DECODE_STEPS

    return {f"batch {size}": lambda size=size: run(size) for size in sizes}


def prefill_rows(model: Model, folder: Path, n_tokens: int, repeats: int, seed: int) -> list[Row]:
    dtype = model.loaded.spec.dtype_name
    work = prefill_work(model.loaded, folder, model.prompt(random.Random(seed), n_tokens))
    figures = measure.in_turns({name: timed(run) for name, run in work.items()}, repeats)
    gain = ratios(figures["transformers"], figures["headwater"])
    return [
        Row(f"prefill of {n_tokens:,} tokens, {dtype}, headwater / transformers", "x", gain, f">= {PREFILL_LIMIT}"),
        *(
            Row(f"prefill of {n_tokens:,} tokens, {dtype}, {name}", "tokens/s", [n_tokens / s for s in seconds])
            for name, seconds in figures.items()
        ),
    ]


def decode_rows(model: Model, context: int, repeats: int, seed: int) -> list[Row]:
    what = f"decode at {context:,} tokens, {model.loaded.spec.dtype_name}"
    work = decode_work(model.loaded, model.prompt(random.Random(seed), context), BATCHES)
    figures = measure.in_turns({name: timed(run) for name, run in work.items()}, repeats)
    rates = {n: [n * DECODE_STEPS / s for s in figures[f"batch {n}"]] for n in BATCHES}
    return [
        Row(f"{what}, batch 8 / batch 1", "x", ratios(rates[8], rates[1]), f">= {DECODE_LIMIT}"),
        *(Row(f"{what}, batch {n}", "tokens/s", rate) for n, rate in rates.items()),
    ]


def main() -> None:
    given = measure.options(__doc__, "prefill", repeats=5)
    rows: list[Row] = []
    with bench_checkpoint() as folder:
        for dtype in DTYPES:
            model = Model(folder, dtype)
            n_tokens = SMALL_PROMPT if given.small else PROMPT
            rows += prefill_rows(model, folder, n_tokens, given.repeats, given.seed)
            for context in SMALL_CONTEXTS if given.small else CONTEXTS:
                rows += decode_rows(model, context, given.repeats, given.seed)
    measure.report(given, rows, model=MODEL, decode_steps=DECODE_STEPS)


if __name__ == "__main__":
    main()
