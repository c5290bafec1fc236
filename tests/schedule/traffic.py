"""Random traffic over random memory, and what must hold of a scheduler after any of it."""

import random
from collections.abc import Callable
from typing import Any

from headwater.schedule.kinds.request import Request
from headwater.schedule.sequence import Phase
from tests.schedule.ledger import Lab

Ask = Callable[[list[int], int, str], Request]  # a prompt, how many tokens its answer has, its namespace


def drawn_sizes(rng: random.Random) -> tuple[int, dict[str, Any]]:
    """The tokens of the longest request, and a lab's sizes, from the smallest memory that serves it upwards."""
    checkpoint_pages, longest = rng.choice([1, 2, 5]), rng.choice([40, 80])
    smallest = -(-longest // 4) + checkpoint_pages
    return longest, {
        "n_pages": rng.choice([smallest, smallest + 7, 3 * smallest, 300]),
        "checkpoint_pages": checkpoint_pages,
        "max_running": rng.choice([1, 3, 8]),
        "tokens_per_step": rng.choice([4, 16, 64]),
        "placement": rng.choice(["headwater", "structural", "branch", "every_block(2)", "none"]),
    }


def run_traffic(rng: random.Random, it: Lab, longest: int, ask: Ask) -> list[Request]:
    """Requests that share beginnings, some going on from answers, some cancelled; until all others are answered.

    Returns those.
    """
    heads = [[rng.randrange(5) for _ in range(longest)] for _ in range(3)]
    said: list[list[int]] = []
    asked: list[Request] = []
    for _ in range(rng.randrange(1, 60)):
        if rng.random() < 0.4:
            start = rng.choice(said) if said and rng.random() < 0.5 else rng.choice(heads)
            prompt = [*start[: rng.randrange(0, longest - 10)], *(rng.randrange(5) for _ in range(rng.randrange(1, 9)))]
            most = rng.randrange(1, longest - len(prompt) + 1)
            asked.append(ask(prompt, most, rng.choice(["", "", "x"])))
        elif rng.random() < 0.1 and asked:
            seq = rng.choice(asked)
            if seq.phase is not Phase.DONE:
                it.scheduler.cancel(seq)
                asked.remove(seq)
        else:
            it.step()
        said += [s.tokens for s in asked if s.phase is Phase.DONE][-2:]
    it.run()
    return asked


def check_nothing_is_lost(it: Lab, asked: list[Request]) -> None:
    """All are answered whole, and every page is free or cached."""
    assert all(seq.n_output == seq.generation.params.max_tokens for seq in asked)
    stats = it.cache.stats()
    assert stats.pages_private == stats.pages_slot == stats.leases == stats.open_plans == 0
    assert stats.pages_free + stats.pages_kv + stats.pages_checkpoint + stats.pages_tail == it.layout.n_pages
