"""Speed of each recurrent layer: prefill against transformers, with states and transitions kept, and decode.

    python -m benchmarks.mixers [--repeats 5] [--threads 2] [--small]

All sides of a mixer run in turns within one process, in float32, from the same random rows. A layer is whole, with
its projections, convolution, gates and norm; what it is, the output says.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks import measure
from benchmarks.measure import Figures, Row, ratios, timed
from benchmarks.mixer_layers import LAYERS, WIDTH, Compared, products_of, run_oracle
from headwater.mixers.batch import StepBatch
from headwater.mixers.recurrent import LayerState, RecurrentMixer
from headwater.mixers.slices import CHUNK, Slice

TOKENS, SMALL_TOKENS = (2048, 8192), (64, 128)
STEPS, SMALL_STEPS, BATCHES = 20, 2, (1, 16)
STATES_COST, TRANSITION_COST, BATCH_GAIN = 1.03, 1.15, 6
NONE = torch.empty(0, dtype=torch.int64)
Work = dict[str, Callable[[], object]]


def state_of(compared: Compared, mixer: RecurrentMixer, rows: int) -> LayerState:
    states = {name: torch.zeros(rows, *shape) for name, shape in compared.layer.states}
    return LayerState(states["recurrent"], states.get("conv"), mixer.identity()[None].clone())


def prefill_of(n_tokens: int, saves: bool = False, transition: bool = False) -> StepBatch:
    """One sequence in slot 0, of which the state at each page boundary is kept in a row of its own."""
    ends = range(CHUNK, n_tokens + 1, CHUNK) if saves else ()
    kept = tuple((end, 1 + i) for i, end in enumerate(ends))
    one = Slice(0, n_tokens, 0, 0, NONE, 0, kept, 0 if transition else None)
    return StepBatch(NONE, NONE, (one,), NONE, (), NONE)


def prefill_work(compared: Compared, lengths: tuple[int, ...]) -> Work:
    mixer, theirs = compared.ours(), compared.oracle()
    state = state_of(compared, mixer, 1 + lengths[-1] // CHUNK)
    work: Work = {}
    for n in lengths:
        x_TD = torch.randn(n, WIDTH)
        plain, kept = prefill_of(n), prefill_of(n, saves=True)
        moved = prefill_of(n, transition=True)
        work[f"{n:,} tokens, headwater"] = lambda x=x_TD, batch=plain: mixer.forward(x, batch, state)
        if theirs is not None:
            work[f"{n:,} tokens, transformers"] = lambda x=x_TD: run_oracle(theirs, x)
            work[f"{n:,} tokens, transformers' products"] = products_of(theirs, n)
            work[f"{n:,} tokens, headwater's products"] = products_of(mixer, n)
        work[f"{n:,} tokens, every state kept"] = lambda x=x_TD, batch=kept: mixer.forward(x, batch, state)
        work[f"{n:,} tokens, with the transition"] = lambda x=x_TD, batch=moved: mixer.forward(x, batch, state)
    return work


def decode_work(compared: Compared, n_steps: int) -> Work:
    """So many tokens of each sequence."""
    mixer = compared.ours()
    state = state_of(compared, mixer, max(BATCHES))

    def steps(n: int) -> Callable[[], object]:
        x_BD, batch = torch.randn(n, WIDTH), StepBatch(NONE, NONE, (), torch.arange(n), (NONE,) * n, NONE)
        return lambda: [mixer.forward(x_BD, batch, state) for _ in range(n_steps)]

    return {f"decode of {n}": steps(n) for n in BATCHES}


def prefill_rows(name: str, compared: Compared, lengths: tuple[int, ...], figures: Figures) -> list[Row]:
    rows = [Row(f"{name}, {piece}", "ms", [1e3 * s for s in seconds]) for piece, seconds in figures.items()]
    for n in lengths:
        ours, at = figures[f"{n:,} tokens, headwater"], f"{n:,} tokens"
        goals = {
            "transformers": f">= {compared.goal}",
            "every state kept": f"<= {STATES_COST}",
            "with the transition": f"<= {TRANSITION_COST}",
        }
        for piece, goal in goals.items():
            seconds = figures.get(f"{at}, {piece}")
            if seconds is not None:
                rows.append(Row(f"{name}, {at}: {piece} / headwater", "x", ratios(seconds, ours), goal))
        if f"{at}, transformers" in figures:
            rows.append(Row(f"{name}, {at}: the same between products", "x", between_products(at, figures)))
    return rows


def between_products(at: str, figures: Figures) -> list[float]:
    """Return the speed-up of all work other than the products with weights, which are the same on both sides."""
    theirs, ours = (
        [
            whole - products
            for whole, products in zip(figures[f"{at}, {side}"], figures[f"{at}, {side}{s}"], strict=True)
        ]
        for side, s in (("transformers", "' products"), ("headwater", "'s products"))
    )
    return ratios(theirs, ours)


def decode_rows(name: str, n_steps: int, figures: Figures) -> list[Row]:
    one, many = (figures[f"decode of {n}"] for n in BATCHES)
    rate = {n: [n * n_steps / s for s in figures[f"decode of {n}"]] for n in BATCHES}
    gain = [BATCHES[1] / BATCHES[0] * r for r in ratios(one, many)]
    rows = [Row(f"{name}, decode of {n}", "tokens/s", values) for n, values in rate.items()]
    return [*rows, Row(f"{name}, decode of {BATCHES[1]} / of {BATCHES[0]}", "x", gain, f">= {BATCH_GAIN}")]


def rows_of(name: str, compared: Compared, lengths: tuple[int, ...], n_steps: int, repeats: int) -> list[Row]:
    prefill = {piece: timed(run) for piece, run in prefill_work(compared, lengths).items()}
    rows = prefill_rows(name, compared, lengths, measure.in_turns(prefill, repeats))
    del prefill
    decode = {piece: timed(run) for piece, run in decode_work(compared, n_steps).items()}
    return rows + decode_rows(name, n_steps, measure.in_turns(decode, repeats))


def main() -> None:
    given = measure.options(__doc__, "mixers", repeats=5)
    torch.manual_seed(given.seed)
    lengths, n_steps = (SMALL_TOKENS, SMALL_STEPS) if given.small else (TOKENS, STEPS)
    rows: list[Row] = []
    with torch.inference_mode():
        for name, compared in LAYERS.items():
            rows += rows_of(name, compared, lengths, n_steps, given.repeats)
    layers = {name: repr(compared.layer) for name, compared in LAYERS.items()}
    measure.report(given, rows, layers=layers, decode_steps=n_steps)


if __name__ == "__main__":
    main()
