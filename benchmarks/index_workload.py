"""Agents' sessions over shared prefixes: the prompts that the index is measured on."""

from __future__ import annotations

import numpy as np

VOCABULARY = 150_000
Tokens = np.ndarray


def log_uniform(rng: np.random.Generator, low: int, high: int, count: int) -> np.ndarray:
    return np.exp(rng.uniform(np.log(low), np.log(high), count)).astype(int)


def fresh(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


def session(rng: np.random.Generator, prefix: Tokens, lengths: np.ndarray) -> list[Tokens]:
    """Turns of growing length that begin with `prefix`; one in eight is retried from the second half of another."""
    turns: list[Tokens] = []
    text = prefix
    for length in np.sort(lengths):
        if turns and rng.random() < 1 / 8:
            earlier = turns[rng.integers(len(turns))]
            text = earlier[: rng.integers(len(earlier) // 2, len(earlier))]
        text = np.concatenate([text, fresh(rng, max(0, length - len(text)))])
        turns.append(text[:length].copy())
    return turns


def workload(n_turns: int = 2000, n_prefixes: int = 40, seed: int = 7) -> list[Tokens]:
    """`n_turns` prompts of 2k to 32k tokens, log-uniform.

    Sessions have 8 turns on average (geometric), begin with one of 40 prefixes of 1k to 8k tokens (Zipf, exponent 1)
    and overlap in time; each one's turns stay in order.
    """
    rng = np.random.default_rng(seed)
    prefixes = [fresh(rng, length) for length in log_uniform(rng, 1024, 8192, n_prefixes)]
    popularity = 1 / np.arange(1, n_prefixes + 1)
    lengths = log_uniform(rng, 2048, 32768, n_turns)
    timed: list[tuple[float, Tokens]] = []
    while len(timed) < n_turns:
        count = min(int(rng.geometric(1 / 8)), n_turns - len(timed))
        prefix = prefixes[rng.choice(n_prefixes, p=popularity / popularity.sum())]
        turns = session(rng, prefix, lengths[len(timed) : len(timed) + count])
        times = np.sort(rng.uniform(0, 0.5) + rng.uniform(0, 0.5, count))
        timed += zip(times.tolist(), turns, strict=True)
    return [turn for _, turn in sorted(timed, key=lambda pair: pair[0])]
