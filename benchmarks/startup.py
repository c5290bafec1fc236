"""Start-up time of the server, and its resident memory with a full cache.

    python -m benchmarks.startup [--repeats 5] [--threads 2] [--small]

Start-up: from the process's start until /health answers, on the embedded checkpoint.
Memory: what is resident beyond the model and `--memory`, after traffic of more than `--memory` holds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import measure
from benchmarks.engines import MODEL, Model, bench_checkpoint
from benchmarks.measure import Row
from benchmarks.servers import Serving, complete, serve, status_mb

START_LIMIT = 5  # seconds
RESIDENT_LIMIT = 600  # MB beyond model and --memory
MEMORY, SMALL_MEMORY = 10**9, 10**8  # bytes
LONG, SHORT, AT_ONCE = 8192, 640, 8  # tokens, tokens, prompts


def start_seconds() -> float:
    with serve("--memory", "500MB") as serving:
        return serving.start_seconds


def startup_rows(repeats: int) -> list[Row]:
    start_seconds()  # its files are read from the disk
    taken = [start_seconds() for _ in range(repeats)]
    return [Row("start-up, embedded checkpoint", "s", taken, f"<= {START_LIMIT}")]


@contextmanager
def filled(model: Model, folder: Path, memory: int, seed: int) -> Iterator[Serving]:
    """A server that has had a long prompt, several at once, and twice as many checkpoints as fit."""
    rng, spec = random.Random(seed), model.loaded.spec
    with serve(str(folder), "--memory", f"{memory}B") as serving:
        complete(serving.port, model.prompt(rng, LONG if memory == MEMORY else SHORT), 8)
        n_prompts = 2 * memory // (9 * spec.checkpoint_pages * spec.page_bytes)  # 9 checkpoints each
        for _ in range(-(-n_prompts // AT_ONCE)):
            complete(serving.port, [model.prompt(rng, SHORT) for _ in range(AT_ONCE)], 8)
        yield serving


def memory_rows(memory: int, seed: int) -> list[Row]:
    with bench_checkpoint() as folder:
        model = Model(folder)
        with filled(model, folder, memory, seed) as serving:
            resident, peak = (status_mb(serving.process.pid, field) for field in ("VmRSS", "VmHWM"))
    known = (model.loaded.spec.weight_bytes + memory) / 1e6
    return [
        Row("resident beyond model and --memory, full", "MB", [resident - known], f"<= {RESIDENT_LIMIT}"),
        Row("the same at its peak", "MB", [peak - known], f"<= {RESIDENT_LIMIT}"),
        Row("model and --memory", "MB", [known]),
    ]


def main() -> None:
    given = measure.options(__doc__, "startup", repeats=5)
    rows = startup_rows(given.repeats) + memory_rows(SMALL_MEMORY if given.small else MEMORY, given.seed)
    measure.report(given, rows, model=MODEL, dtype="float32")


if __name__ == "__main__":
    main()
