"""Kullback-Leibler divergence (1951) of two servers' reported next-token distributions.

An API reports only the most likely tokens. Tokens that both servers report are compared one by one, all others as one
bucket, so the figure is at most the divergence of the whole distributions: grouping outcomes never adds to it (Cover
and Thomas 2006, section 2.7).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headwater.evaluate.asking import Run
from headwater.evaluate.items import Json
from headwater.evaluate.perplexity import Distribution, Window
from headwater.evaluate.server import Server
from headwater.evaluate.summary import Estimate, estimate
from headwater.load.endpoint import ServerError
from headwater.percentile import percentile

MAX_TOP_LOGPROBS = 20  # reported by the API
MIN_PROBABILITY = 1e-9  # of the other server's bucket: sums of rounded numbers reach 1


@dataclass(frozen=True, slots=True)
class Divergence:
    """The divergence of one server from another over some positions, in nats."""

    positions: int
    mean: Estimate
    p50: float
    p99: float
    max: float
    same_first: int  # positions at which both have the same most likely token
    failed: Mapping[str, int]  # positions that a server did not report, by its error

    @classmethod
    def of(cls, pairs: Sequence[Pair], failed: Mapping[str, int], seed: int) -> Divergence:
        """Summarise the positions; raises ServerError if there are none."""
        if not pairs:
            raise ServerError("; ".join(failed) or "0 positions have no divergence")
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
    """The most likely tokens of two servers after the same text. Pairs of a group are not independent."""

    ours: Distribution
    theirs: Distribution
    group: int


def divergence(p: Distribution, q: Distribution) -> float:
    """Return KL(p || q) in nats over the tokens that both have, and a bucket for the rest."""
    shared = p.keys() & q.keys()
    rest_p = max(0.0, 1 - math.fsum(math.exp(p[token]) for token in shared))
    rest_q = max(MIN_PROBABILITY, 1 - math.fsum(math.exp(q[token]) for token in shared))
    parts = [math.exp(p[token]) * (p[token] - q[token]) for token in shared]
    if rest_p > MIN_PROBABILITY:
        parts.append(rest_p * math.log(rest_p / rest_q))
    return max(0.0, math.fsum(parts))


def likeliest(one: Distribution) -> str:
    return max(one, key=lambda token: one[token])


def of_windows(ours: Sequence[Window], theirs: Sequence[Window]) -> list[Pair]:
    """Pair the positions of a text that both servers scored; positions of a window are a group."""
    return [
        Pair(p, q, number)
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True))
        for p, q in zip(a.tops, b.tops, strict=True)
    ]


def of_items(run: Run, other: Server, on_item: Callable[[], None]) -> tuple[list[Pair], dict[str, int]]:
    """Ask a run's server and another for the first token after each item's prompt. Counts errors by message."""

    def asked(item_number: int) -> Pair | str:
        item = run.items[item_number]
        fields = {**run.fields(item), "max_tokens": 1, "logprobs": True, "top_logprobs": MAX_TOP_LOGPROBS}
        try:
            return Pair(next_token(run.server, fields), next_token(other, fields), item.group)
        except ServerError as error:
            return str(error)
        finally:
            on_item()

    with ThreadPoolExecutor(run.at_once) as pool:
        found = list(pool.map(asked, range(len(run.items))))
    failed = Counter(one for one in found if isinstance(one, str))
    return [one for one in found if isinstance(one, Pair)], dict(failed)


def next_token(server: Server, fields: Json) -> Distribution:
    """Return the most likely first tokens of an answer. Raises ServerError."""
    answer = server.chat(fields)
    try:
        tops = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        found = {str(top["token"]): float(top["logprob"]) for top in tops}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerError(f"{server.url}: the answer has no log probabilities") from error
    if not found:
        raise ServerError(f"{server.url}: the answer has 0 of {MAX_TOP_LOGPROBS} most likely tokens")
    return found
