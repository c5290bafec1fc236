"""Do fewer tokens to recompute take less time, and what does a resumption begin with?

    python -m benchmarks.sparse [sparse-3] [sparse-4] --data FOLDER [--repeats 2] [--small] [--out docs/results]

One attention and three Gated DeltaNet layers of Qwen3.5-0.8B's sizes with random weights, in bfloat16, on the engine's
model, arena and state memory. Writes figures 3 and 4 of the sparse prefix caching paper as `python -m papers` would.
Where prompts resume comes from the data; their tokens are random, since times do not depend on them. Times are CPU
time of one thread, which on an idle core is wall-clock time, and on a busy one hardly depends on who else runs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks import measure
from benchmarks.engines import Model
from headwater.cli.common import prepare_outputs
from headwater.mixers.numerics import prepare_process
from papers import FIGURES
from papers.figure import Figure, Found
from papers.lab import Lab, Used, document, write
from papers.results import refuse_dirty_tree
from papers.sparse.overlaps import PROMPTS, QUALITY
from papers.sparse.placements import PLACEMENTS, Measured, Times, frontier, proportional
from papers.sparse.savings import resumptions
from tests import checkpoints
from tests.checkpoints import qwen
from tests.support import Bench

GROUP = qwen.DENSE.recipe(
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    hidden_size=1024,
    intermediate_size=3584,
    num_attention_heads=8,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
)
LONGEST = 8192  # tokens of a prompt
STEP = 1024  # tokens of a step, as the engine has it
LENGTHS = (2048, 8192)
RECOMPUTED = (64, 256, 512, 1024, 2048, 4096)
REQUESTS = {QUALITY: 2, PROMPTS: 8}  # of each data set; its other requests only teach the placements

Cell = tuple[int, int]  # where a prompt resumes, and its length


@dataclass
class Group:
    """The layer group with a prompt of LONGEST tokens in its arena, and a checkpoint of it halfway."""

    bench: Bench
    tokens: list[int]
    halfway: int

    def __post_init__(self) -> None:
        self.seq = self.bench.sequence(len(self.tokens))
        spec = self.bench.model.spec
        self.checkpoint = self.bench.sequence(spec.checkpoint_pages * spec.page_size).table.tolist()
        self.cold = self._run(self.halfway)
        self.bench.states.save(self.seq.slot, self.bench.arena.pages, self.checkpoint)
        self.cold = self._run(len(self.tokens))

    def resume(self, position: int, length: int) -> torch.Tensor:
        """Logits of the last of `length` tokens. From any position the same checkpoint: no time depends on its bits."""
        if position:
            self.load_state()
        else:
            self.bench.states.zero(self.seq.slot)
        self.seq.length = position
        return self._run(length)

    def load_state(self) -> None:
        self.bench.states.restore(self.seq.slot, self.bench.arena.pages, self.checkpoint)

    def load_kv(self, length: int) -> None:
        for layer in self.bench.model.spec.attention_layers:
            self.bench.arena.gather(layer, self.seq.table, length)

    def exact(self) -> bool:
        return torch.equal(self.resume(self.halfway, len(self.tokens)), self.cold)

    def _run(self, length: int) -> torch.Tensor:
        while self.seq.length < length:
            end = min(length, self.seq.length + STEP)
            logits_RV = self.bench.step([(self.seq, self.tokens[self.seq.length : end])])
        return logits_RV


def taken(run: Callable[[], object]) -> Callable[[], float]:
    """The same work, returning its CPU seconds: torch has one thread here."""

    def seconds() -> float:
        start = time.process_time()
        run()
        return time.process_time() - start

    return seconds


@contextmanager
def group(longest: int, seed: int) -> Iterator[Group]:
    with tempfile.TemporaryDirectory() as root:
        checkpoints.write(Path(root) / "group", GROUP)
        model = Model(Path(root) / "group", "bfloat16")
    bench = Bench(model.loaded.model, n_pages=longest // 64 + model.loaded.spec.checkpoint_pages + 1)
    with torch.inference_mode():
        yield Group(bench, model.prompt(random.Random(seed), longest), longest // 2)


def linear(of: Group, lengths: tuple[int, ...], repeats: int) -> Found:
    """Figure 4."""
    exact = of.exact()  # first: what is timed resumes with another position's state, and leaves KV that follows from it
    work: dict[tuple[int, int | str], Callable[[], float]] = {}
    for length in lengths:
        work[length, "state"] = taken(of.load_state)
        work[length, "kv"] = taken(lambda length=length: of.load_kv(length))
        for n in (n for n in RECOMPUTED if n < length):
            work[length, n] = taken(lambda n=n, length=length: of.resume(length - n, length))
    every = measure.in_turns(work, repeats)
    seconds = {name: statistics.median(values) for name, values in every.items()}
    widest = max(spread(values) for name, values in every.items() if isinstance(name[1], int))
    times = [
        Times(
            length,
            {n: seconds[length, n] for n in RECOMPUTED if n < length},
            seconds[length, "state"],
            seconds[length, "kv"],
        )
        for length in lengths
    ]
    return proportional(times, widest, exact)


def pareto(of: Group, lab: Lab, small: bool) -> Found:
    """Figure 3. Each cell is run once: figure 4 tells how far repetitions lie apart."""
    found = {}
    for dataset, count in ((PROMPTS, 1),) if small else REQUESTS.items():
        seen = replace(dataset, passes=1).seen(lab)
        late = [i for i, one in enumerate(seen) if one.depth and one.length <= len(of.tokens) and 2 * i > len(seen)]
        chosen = random.Random(lab.seed).sample(late, count)
        resumed = {label: resumptions(spelling, seen) for label, spelling in PLACEMENTS.items()}
        cells = {(one.at[i], seen[i].length) for one in resumed.values() for i in chosen}
        work = {cell: taken(lambda cell=cell: of.resume(*cell)) for cell in sorted(cells)}
        seconds = {cell: work[cell]() for cell in random.Random(lab.seed).sample(list(work), len(work))}
        found[dataset.name] = {
            label: Measured(tuple(seconds[one.at[i], seen[i].length] for i in chosen), one.checkpoints)
            for label, one in resumed.items()
        }
    return frontier(found)


def spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def report(figure: Figure, lab: Lab, found: Found, begin: float, folder: Path, small: bool) -> None:
    write(document(figure, lab, found, time.perf_counter() - begin), folder, small=small)
    for line in found.lines:
        print(f"{figure.name}: {line.label}: {measure.shown(line.ours or 0.0)} {line.unit}")
    for shape in found.shapes:
        print(f"{figure.name}: {shape.says}: {shape.holds}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", help="sparse-3, sparse-4; both")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--out", type=Path, default=measure.HERE.parent / "docs" / "results")
    given = parser.parse_args()
    prepare_outputs(folders=[given.out])
    refuse_dirty_tree(given.out, small=given.small)
    prepare_process(1)
    lab = Lab(given.data, seed=given.seed)
    lengths = LENGTHS[:1] if given.small else LENGTHS
    with group(lengths[-1], given.seed) as of:
        begun = measure.cpu_seconds()
        on = f"one layer group in bfloat16 on {measure.machine()['cpu']}, one thread, CPU time"
        lab.used[Used("random tokens", len(lengths), sum(lengths), on, 64, "one by one")] = None
        runs = {
            "sparse-4": lambda: linear(of, lengths, given.repeats),
            "sparse-3": lambda: pareto(of, lab, given.small),
        }
        for name, run in runs.items():
            if not given.figures or name in given.figures:
                begin = time.perf_counter()
                report(FIGURES[name], lab, run(), begin, given.out, given.small)
        print(f"{measure.busy_with_others(begun)} cores were busy with other processes")


if __name__ == "__main__":
    main()
