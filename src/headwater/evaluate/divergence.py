"""How far two servers' next tokens are apart: Kullback-Leibler divergence (1951), as far as an API tells it.

An API tells the most likely tokens alone. What both tell is compared one by one, and all else as one bucket, so the
figure is at most the divergence of the whole distributions (grouping outcomes never adds to it: Cover and Thomas
2006, section 2.7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headwater.evaluate.answered import Json
from headwater.evaluate.asking import Run
from headwater.evaluate.bootstrap import Estimate, estimate
from headwater.evaluate.server import Server, ServerFault
from headwater.evaluate.text import Distribution, Window
from headwater.percentile import percentile

MOST = 20  # tokens that the API tells
FLOOR = 1e-9  # the least that the other's bucket has: sums of rounded numbers come to 1


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of one server from another, in nats, at some positions."""

    positions: int
    mean: Estimate
    p50: float
    p99: float
    max: float
    same_first: int  # positions where both have the same token as the most likely one
    failed: dict[str, int]  # positions that one of the two did not tell, by what it said

    @classmethod
    def of(cls, pairs: Sequence[Pair], failed: dict[str, int], seed: int) -> Divergence:
        """Raises ServerFault where nothing was told."""
        if not pairs:
            raise ServerFault("; ".join(failed) or "0 positions have no divergence")
        nats = [divergence(pair.ours, pair.theirs) for pair in pairs]
        ascending = sorted(nats)
        return cls(
            positions=len(pairs),
            mean=estimate(nats, [pair.group for pair in pairs], seed),
            p50=percentile(ascending, 50),
            p99=percentile(ascending, 99),
            max=ascending[-1],
            same_first=sum(likeliest(pair.ours) == likeliest(pair.theirs) for pair in pairs),
            failed=failed,
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """Two servers' most likely tokens after the same text."""

    ours: Distribution
    theirs: Distribution
    group: int  # those of a group are no independent observations


def divergence(p: Distribution, q: Distribution) -> float:
    """KL(p || q) in nats over the tokens that both have, and a bucket for the rest."""
    shared = p.keys() & q.keys()
    rest_p = max(0.0, 1 - math.fsum(math.exp(p[token]) for token in shared))
    rest_q = max(FLOOR, 1 - math.fsum(math.exp(q[token]) for token in shared))
    parts = [math.exp(p[token]) * (p[token] - q[token]) for token in shared]
    if rest_p > FLOOR:
        parts.append(rest_p * math.log(rest_p / rest_q))
    return max(0.0, math.fsum(parts))


def likeliest(one: Distribution) -> str:
    return max(one, key=lambda token: one[token])


def of_windows(ours: Sequence[Window], theirs: Sequence[Window]) -> list[Pair]:
    """Of a text that both servers scored; positions of a window are a group."""
    return [
        Pair(p, q, number)
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True))
        for p, q in zip(a.tops, b.tops, strict=True)
    ]


def of_items(run: Run, other: Server, on_item: Callable[[], None]) -> tuple[list[Pair], dict[str, int]]:
    """After the prompts of a run's items, on its server and another; what was not told is counted by its message."""
    failed: dict[str, int] = {}

    def asked(number: int) -> Pair | str:
        item = run.items[number]
        fields = {**run.fields(item), "max_tokens": 1, "logprobs": True, "top_logprobs": MOST}
        try:
            return Pair(next_token(run.server, fields), next_token(other, fields), item.group)
        except ServerFault as error:
            return str(error)
        finally:
            on_item()

    with ThreadPoolExecutor(run.at_once) as pool:
        told = list(pool.map(asked, range(len(run.items))))
    for message in (one for one in told if isinstance(one, str)):
        failed[message] = failed.get(message, 0) + 1
    return [one for one in told if isinstance(one, Pair)], failed


def next_token(server: Server, fields: Json) -> Distribution:
    """The most likely first tokens of an answer. Raises ServerFault."""
    answer = server.chat(fields)
    try:
        told = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        found = {str(top["token"]): float(top["logprob"]) for top in told}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerFault(f"{server.url}: the answer has no log probabilities") from error
    if not found:
        raise ServerFault(f"{server.url}: the answer has 0 of {MOST} most likely tokens")
    return found
