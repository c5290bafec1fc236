"""Dispatch of a prompt's cold segments to several workers, each of which computes its own (HYPIC, section 4.4).

One worker combines: it computes the rest of the prompt, and the answer, and pulls the others' segments one by one. All
functions are pure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappush, heapreplace

from headwater.cluster.cost import Candidate, Prompt, expected_seconds, prefill_speeds
from headwater.schedule.prefill_seconds import PrefillSpeed
from headwater.schedule.tier_load import ReadSpeed

MAX_COMBINERS = 4  # with a dispatch each: the workers that cost least without others


@dataclass(frozen=True, slots=True)
class Lane:
    """A worker that computes segments, one after the other. Seconds."""

    queue: float  # until it begins
    token: float  # of each token
    hand_over: ReadSpeed | None = None  # to the worker that combines; None: it is that worker

    def seconds_of_pull(self, tokens: int) -> float:
        """Return the seconds to pull a segment of `tokens` tokens."""
        return 0.0 if self.hand_over is None else seconds_to_read(tokens, self.hand_over)


def seconds_to_read(tokens: int, reading: ReadSpeed) -> float:
    """Return the seconds to read a segment: KV of `tokens` tokens, a state, and a transition of that size."""
    return reading.seconds(tokens) + reading.state


def longest_first(tokens: Sequence[int]) -> list[int]:
    """Return the indices of segments in the order in which they are assigned, and computed by each worker (LPT)."""
    return sorted(range(len(tokens)), key=lambda i: -tokens[i])


def soonest(tokens: Sequence[int], lanes: Sequence[Lane]) -> list[int]:
    """Assign segments, the longest first, each to the worker from which it comes soonest to the one that combines.

    Equation 9 in seconds: a sum begins with the worker's queue, and a segment ends with its transfer. Only the
    first to end of several workers that differ only in their queues is compared.
    """
    found = [0] * len(tokens)
    alike: defaultdict[tuple[float, ReadSpeed | None], list[tuple[float, int]]] = defaultdict(list)  # heaps of ends
    for n, lane in enumerate(lanes):
        heappush(alike[lane.token, lane.hand_over], (lane.queue, n))
    for i in longest_first(tokens):
        soonest_of_each = (ends[0] for ends in alike.values())
        _, n, end = min(
            (end + tokens[i] * lanes[n].token + lanes[n].seconds_of_pull(tokens[i]), n, end)
            for end, n in soonest_of_each
        )
        heapreplace(alike[lanes[n].token, lanes[n].hand_over], (end + tokens[i] * lanes[n].token, n))
        found[i] = n
    return found


def ready_at(tokens: Sequence[int], lanes: Sequence[Lane], assigned: Sequence[int], pulling: float = 0.0) -> float:
    """Return the seconds until the worker that combines has all segments: pulled one by one as they are computed.

    `pulling`: seconds for which it pulls others first.
    """
    ends, own, remote = [lane.queue for lane in lanes], 0.0, []
    for i in longest_first(tokens):
        lane = lanes[assigned[i]]
        ends[assigned[i]] += tokens[i] * lane.token
        if lane.hand_over is None:
            own = ends[assigned[i]]
        else:
            remote.append((ends[assigned[i]], lane.seconds_of_pull(tokens[i])))
    there = pulling
    for computed, seconds in sorted(remote):
        there = max(there, computed) + seconds
    return max(own, there)


@dataclass(frozen=True, slots=True)
class Segment:
    """Segment of a prompt to dispatch. Tokens."""

    start: int  # in the prompt
    tokens: int  # to compute, if it is built
    interior: int  # that a request does not compute itself
    holders: Collection[int]  # workers that have it in memory, or are computing it
    stores: Mapping[int, Sequence[str]] = field(default_factory=dict)  # own stores that have it: media, by worker

    def load_seconds(self, at: int, one: Candidate) -> float:
        """Return the seconds in which a worker loads it from its own store; infinite if no store has it."""
        speeds = (one.loads[medium] for medium in self.stores.get(at, ()) if medium in one.loads)
        return min((seconds_to_read(self.tokens, speed) for speed in speeds), default=math.inf)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Workers of a prompt, by index."""

    combiner: int
    builders: dict[int, int]  # of each segment to build, by its index; the longest first
    pulled: dict[int, int]  # workers from which the combining one pulls, by segment
    loaded: Sequence[int]  # segments that it loads from its own store when the request begins
    interiors: int  # tokens of all segments, which the combining worker does not compute itself
    seconds: float  # the cost: until the first token, and of evicted tokens

    @property
    def is_alone(self) -> bool:
        """True if the combining worker has, loads or computes all segments, so that nothing is prepared."""
        return not self.pulled and all(worker == self.combiner for worker in self.builders.values())


def dispatch(
    prompt: Prompt, segments: Sequence[Segment], candidates: Sequence[Candidate], combiners: Sequence[int]
) -> Dispatch:
    """Return the dispatch of least cost over the workers that may combine, by themselves or with others of their pools.

    Others compute segments only if that is faster, transfers included. `candidates`: workers whose reads are priced.
    The fewest requests decide between equal costs. If there are more than `MAX_COMBINERS` workers, those that cost
    least by themselves are compared.
    """
    speeds = prefill_speeds(candidates)
    if len(combiners) > MAX_COMBINERS:
        alone = {at: _seconds_alone(at, prompt, segments, candidates[at], speeds[at]) for at in combiners}
        combiners = sorted(combiners, key=lambda at: (alone[at], candidates[at].load))[:MAX_COMBINERS]
    found = [_combined_at(at, prompt, segments, candidates, speeds) for at in combiners]
    return min(found, key=lambda one: (one.seconds, candidates[one.combiner].load))


def _seconds_alone(at: int, prompt: Prompt, segments: Sequence[Segment], one: Candidate, speed: PrefillSpeed) -> float:
    """Return the cost of one worker that computes all segments that it lacks."""
    start = max(one.own, one.read)
    needed = [segment for segment in segments if segment.start >= start]
    interiors = sum(segment.interior for segment in needed)
    lacking = (segment for segment in needed if at not in segment.holders)
    seconds = sum(min(segment.tokens * speed.token, segment.load_seconds(at, one)) for segment in lacking)
    return expected_seconds(prompt, replace(one, composed=interiors), speed) + seconds


def _combined_at(
    at: int,
    prompt: Prompt,
    segments: Sequence[Segment],
    candidates: Sequence[Candidate],
    speeds: Sequence[PrefillSpeed],
) -> Dispatch:
    """Return the cheaper dispatch with this combining worker: with others or without."""
    one = candidates[at]
    needed = [i for i, segment in enumerate(segments) if segment.start >= max(one.own, one.read)]
    cold, loaded, loading, pulled, pulling = list[int](), list[int](), 0.0, dict[int, int](), 0.0
    for i in needed:
        holders = [n for n in segments[i].holders if candidates[n].pool == one.pool]
        if at in holders:
            continue
        tokens, load = segments[i].tokens, segments[i].load_seconds(at, one)
        pull = seconds_to_read(tokens, one.pull) if holders and one.pull is not None else math.inf
        if min(load, pull) >= tokens * speeds[at].token:
            cold.append(i)
        elif load <= pull:
            loaded.append(i)
            loading += load
        else:
            pulled[i] = min(holders, key=lambda n: candidates[n].load)
            pulling += pull
    builders, ready = _builders(at, [segments[i].tokens for i in cold], candidates, speeds, pulling)
    interiors = sum(segments[i].interior for i in needed)
    queue = one.queued_tokens * speeds[at].token
    cost = expected_seconds(prompt, replace(one, composed=interiors), speeds[at])
    seconds = cost + max(0.0, ready - queue) + loading
    return Dispatch(at, {cold[i]: worker for i, worker in builders.items()}, pulled, loaded, interiors, seconds)


def _builders(
    at: int, tokens: Sequence[int], candidates: Sequence[Candidate], speeds: Sequence[PrefillSpeed], pulling: float
) -> tuple[dict[int, int], float]:
    """Return the worker of each cold segment, the longest first, and the seconds until the combining one has all."""
    one = candidates[at]
    pool = [n for n, other in enumerate(candidates) if n == at or (other.pool == one.pool and one.pull is not None)]
    token = [speed.token for speed in speeds]
    lanes = [Lane(candidates[n].queued_tokens * token[n], token[n], None if n == at else one.pull) for n in pool]
    alone = [pool.index(at)] * len(tokens)
    assigned = soonest(tokens, lanes)
    if ready_at(tokens, lanes, assigned, pulling) >= ready_at(tokens, lanes, alone, pulling):
        assigned = alone
    order = longest_first(tokens)
    return {i: pool[assigned[i]] for i in order}, ready_at(tokens, lanes, assigned, pulling)
