"""Do checkpoints move at memcpy speed?

    python -m benchmarks.restore [--repeats 15] [--threads 2] [--small]

Restoring gathers a checkpoint's pages, saving scatters them; a plain copy of as many bytes between two buffers runs in
turns with them. Each repetition goes once over many checkpoints, in another order than they lie in, so that all three
read and write memory and not caches.
"""

from __future__ import annotations

import random

import torch

from benchmarks import measure
from benchmarks.engines import MODEL, bench_checkpoint
from benchmarks.measure import Row, ratios, timed
from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.models.load import read_spec

CHECKPOINTS = 64
LIMIT = 1.25


def works(n_checkpoints: int, seed: int) -> tuple[dict[str, object], int]:
    """The three pieces of work, and the bytes that each moves."""
    with bench_checkpoint() as folder:
        spec = read_spec(folder, "float32")
    row_bytes = spec.checkpoint_pages * spec.page_bytes
    arena = Arena(spec, n_checkpoints * spec.checkpoint_pages)
    states = StateMemory(spec.state, n_checkpoints, row_bytes)
    source, target = (torch.zeros(n_checkpoints, row_bytes, dtype=torch.uint8) for _ in "st")
    for memory in (arena.pages, states.bytes_RB, source, target):
        memory.fill_(1)
    ids = list(range(arena.n_pages))
    random.Random(seed).shuffle(ids)
    pages = [ids[i::n_checkpoints] for i in range(n_checkpoints)]
    order = random.Random(seed + 1).sample(range(n_checkpoints), n_checkpoints)

    def restore() -> None:
        for row in order:
            states.restore(row, arena.pages, pages[row])

    def save() -> None:
        for row in order:
            states.save(row, arena.pages, pages[row])

    def copy() -> None:
        for row in order:
            target[row].copy_(source[row])

    return {"restore": timed(restore), "save": timed(save), "copy": timed(copy)}, n_checkpoints * row_bytes


def main() -> None:
    given = measure.options(__doc__, "restore", repeats=15)
    work, n_bytes = works(4 if given.small else CHECKPOINTS, given.seed)
    figures = measure.in_turns(work, given.repeats)
    speeds = {name: [n_bytes / s / 1e9 for s in seconds] for name, seconds in figures.items()}
    rows = [
        Row("restore a checkpoint / plain copy", "x", ratios(figures["restore"], figures["copy"]), f"<= {LIMIT}"),
        Row("save a checkpoint / plain copy", "x", ratios(figures["save"], figures["copy"])),
        *(Row(f"{name} of checkpoints' bytes", "GB/s", speed) for name, speed in speeds.items()),
    ]
    measure.report(given, rows, model=MODEL, bytes_a_turn=n_bytes)


if __name__ == "__main__":
    main()
