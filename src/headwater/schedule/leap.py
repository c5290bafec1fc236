"""Many decode steps in one go, for an executor that only counts: where nothing happens but rows growing by a token."""

from __future__ import annotations

from headwater.errors import OutOfPages
from headwater.schedule.limits import GUESTS
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import Phase, Sequence


def free_steps(scheduler: Scheduler, most: int) -> int:
    """How many of the next steps (at most `most`) hold decode rows alone, as far as the scheduler can tell.

    That is until a row completes a page that is published (decode-reuse raw), somebody comes, or ends: 0 where
    prefills run or wait.
    """
    running, unit = scheduler.running.values(), scheduler.layout.unit_tokens
    if scheduler.answers or any(seq.phase is not Phase.DECODE for seq in running):
        return 0
    if len(scheduler.waiting) and len(running) < scheduler.limits.max_running + GUESTS:
        return 0
    if scheduler.decode_reuse == "raw":
        most = min(most, *(unit - 1 - seq.computed % unit for seq in running))
    return most


def decode_ahead(scheduler: Scheduler, steps: int) -> bool:
    """Do what `steps` steps of decode rows do to cache and sequences; their tokens are the caller's to append.

    False where memory runs out on the way: some pages are reserved then, and the next step goes the ordinary way.
    """
    try:
        for seq in scheduler.running.values():
            _reach(scheduler, seq, seq.computed + steps)
    except OutOfPages:
        return False
    for seq in scheduler.running.values():
        seq.computed += steps
        scheduler.shares.charge(seq.namespace, steps)
    scheduler.decode_tokens += steps * len(scheduler.running)
    return True


def _reach(scheduler: Scheduler, seq: Sequence, target: int) -> None:
    """Reserve the pages of tokens up to `target`."""
    begin = seq.computed
    try:
        while seq.computed < target and scheduler.layout.kv_pages_per_unit:
            scheduler.extend(seq)
            seq.computed = max(seq.computed + 1, len(seq.table) * scheduler.layout.page_size)
    finally:
        seq.computed = begin
