"""Can a tenant tell by the clock what another one sent?

    python -m stress.tenant_timing [--trials 150] [--tokens 1000] [--seed 0]

In each trial tenant A sends prompts, and then latencies are taken, in a drawn order: of B probing what A has sent, of
B probing what nobody has sent, and of A probing what A has sent. The first two must have one distribution, the third
another (or the measurement could not tell anything). Two-sample Kolmogorov-Smirnov, its p-value by permutation of the
labels (Pitman 1937): no assumption on the latencies. Exits with 1 if B can tell at p < 0.001, or A cannot.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass

import httpx
import numpy as np

from stress.live_server import PATIENCE, LiveServer, embedded_model

PAGES = 4000
PERMUTATIONS = 10_000
MAX_P_VALUE = 0.001  # below it the two are reported to differ
SENT_BY_OTHER, SENT_BY_NOBODY, SENT_BY_SELF = "sent by another", "sent by nobody", "sent by itself"

Latencies = dict[str, list[float]]


@dataclass(frozen=True)
class Prober:
    """Sends prompts as one tenant or another, one at a time."""

    http: httpx.Client
    server: LiveServer
    rng: random.Random
    tokens: int

    def prompt(self) -> list[int]:
        return [self.rng.randrange(1, 1000) for _ in range(self.tokens)]

    def send(self, salt: str, prompt: list[int]) -> float:
        """Seconds until the answer, with nothing else to do for the server."""
        assert self.server.engine.drain(PATIENCE)
        begun = time.perf_counter()
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_salt": salt}
        reply = self.http.post("/v1/completions", json=body)
        took = time.perf_counter() - begun
        assert reply.status_code == 200, reply.text
        return took

    def trial(self, latencies: Latencies) -> None:
        """One latency of each kind; the requests before are the same work for all."""
        by_other, by_nobody, by_self = self.prompt(), self.prompt(), self.prompt()
        for prompt in self.rng.sample([by_other, by_self, self.prompt()], 3):
            self.send("A", prompt)
        probes = [(SENT_BY_OTHER, "B", by_other), (SENT_BY_NOBODY, "B", by_nobody), (SENT_BY_SELF, "A", by_self)]
        for kind, salt, prompt in self.rng.sample(probes, 3):
            latencies[kind].append(self.send(salt, prompt))


def ks_statistic(a: np.ndarray, b: np.ndarray) -> float:
    """The largest distance between two empirical distribution functions."""
    at = np.concatenate([a, b])
    below_a = np.searchsorted(np.sort(a), at, side="right") / len(a)
    below_b = np.searchsorted(np.sort(b), at, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())


def permutation_p(a: np.ndarray, b: np.ndarray, permutations: int, seed: int) -> float:
    """Return the p-value, never 0: the share of random labellings with a statistic at least as large."""
    rng, pooled, observed = np.random.default_rng(seed), np.concatenate([a, b]), ks_statistic(a, b)
    as_large = 0
    for _ in range(permutations):
        dealt = rng.permutation(pooled)
        as_large += ks_statistic(dealt[: len(a)], dealt[len(a) :]) >= observed - 1e-12
    return (as_large + 1) / (permutations + 1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Can a tenant tell by the clock what another one sent?")
    parser.add_argument("--trials", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    latencies: Latencies = {SENT_BY_OTHER: [], SENT_BY_NOBODY: [], SENT_BY_SELF: []}
    with (
        LiveServer(*embedded_model(), PAGES) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as http,
    ):
        prober = Prober(http, server, random.Random(args.seed), args.tokens)
        prober.trial({kind: [] for kind in latencies})  # kernels are made, buffers touched
        for _ in range(args.trials):
            prober.trial(latencies)
    return report(latencies, args.seed)


def report(latencies: Latencies, seed: int) -> int:
    for kind, taken in latencies.items():
        low, middle, high = np.percentile(np.array(taken) * 1e3, [25, 50, 75])
        print(f"{kind:16} {len(taken):4} probes, ms: quartiles {low:.2f} {middle:.2f} {high:.2f}")
    nobody = np.array(latencies[SENT_BY_NOBODY])
    told = {}
    for kind in (SENT_BY_OTHER, SENT_BY_SELF):
        other = np.array(latencies[kind])
        p = permutation_p(other, nobody, PERMUTATIONS, seed)
        told[kind] = p < MAX_P_VALUE
        statistic = ks_statistic(other, nobody)
        print(f"{kind} against {SENT_BY_NOBODY}: KS {statistic:.3f}, p {p:.4f}: {'differ' if told[kind] else 'alike'}")
    return 0 if told == {SENT_BY_OTHER: False, SENT_BY_SELF: True} else 1


if __name__ == "__main__":
    sys.exit(main())
