"""Memory that recorded traffic needs: its hit rate over memory from samples, and advice in words."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from headwater.errors import ConfigError
from headwater.journal import Journal
from headwater.lab.distances import Curve, distances
from headwater.lab.replay import run_grid
from headwater.lab.sample import Estimate, Sampled, estimate, groups, parts
from headwater.lab.setup import Setup
from headwater.schedule.replayed import OneByOne
from headwater.traces.arrivals import Arrivals, TimedArrivals, in_order
from headwater.traces.request import Request, Trace

MAX_ERROR = 0.01  # of an estimated hit rate
TARGET_TOKENS = 32_000_000  # of prompts in all samples of a size
MIN_GROUPS = 12  # in a sample
SESSIONS_OF_GROUP = 8, 4, 2, 1  # of each sample; a prefix of more sessions makes no group
MEMORY_FACTOR = 1.5  # a sample's memory has at least that many times a request's pages
CONCURRENT_CHECKS = 2  # full replays that check estimates
PROBED_REQUESTS = 2_000  # to count a request's checkpoints

Order = Sequence[tuple[float, Request]]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Number and size of the samples that are replayed."""

    samples: int = 4
    rate: float | None = None  # share of the trace in a sample; None: chosen by size; full replays if needed
    seed: int = 0
    jobs: int = 0

    def __post_init__(self) -> None:
        if self.samples < 2:
            raise ConfigError(f"samples are {self.samples}, error bars take at least 2")
        if self.rate not in (None, 1) and not 0 < self.rate * self.samples <= 1:
            raise ConfigError(
                f"{self.samples} samples of {self.rate:g} of the trace each must be more than 0, at most 1"
            )


@dataclass(frozen=True, slots=True)
class Size:
    """Hit rate at one size of memory, as a share of all prompt tokens."""

    memory: int  # bytes
    hit_rate: float
    error: float  # half the 95% interval; 0: replayed in full
    rate: float  # share of the trace in each sample; 1: replayed in full
    modelled: float  # by the model, without corrections


@dataclass(frozen=True, slots=True)
class Forecast:
    """Needed replays by the pilot, and their seconds by the clock."""

    counts: dict[int, int]  # parts of the trace for each size; 1: it is replayed in full
    seconds: float  # if the samples are as good as the pilot's
    most: float  # if none of them is

    @property
    def sampled(self) -> int:
        """Return the number of sizes that are estimated from samples."""
        return sum(count > 1 for count in self.counts.values())


class Sizing:
    """Hit rates of one trace under one policy at any memory size. `journal` keeps replays for a later run."""

    def __init__(
        self,
        trace: Trace,
        setup: Setup,
        arrivals: Arrivals,
        sampling: Sampling | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Raise ConfigError if model and trace do not fit. Tails are off: model and ideal count whole units."""
        self.trace, self.setup = trace, replace(setup, tails=False)
        self.sampling = sampling or Sampling()
        self.order = list(in_order(arrivals))
        self.page_bytes = setup.profile.bytes_of_page(setup.page_size)
        self.layout = replace(self.setup, memory=max(setup.memory, self.page_bytes)).layout(trace)
        self.prompt_tokens = sum(request.prompt_tokens for _, request in self.order)
        self.replayed_tokens = 0  # in all replays so far
        self._groups_for: dict[int, list[int]] = {}
        self._journal = journal or Journal(None, None)

    @property
    def ideal(self) -> float:
        """Hit rate with endless memory and a checkpoint at every unit."""
        return self.model.ideal / self.prompt_tokens

    @cached_property
    def model(self) -> Curve:
        return self._model(self.order)

    def range(self) -> tuple[int, int]:
        """Return the useful sizes in bytes: from twice the longest request to the least with nearly ideal hits."""
        longest = max(request.known_tokens for _, request in self.order)
        least = 2 * (longest // self.layout.page_size + self._beside) * self.page_bytes
        return least, max(2 * least, math.ceil(self.model.pages_for(0.999 * self.model.ideal)) * self.page_bytes)

    @property
    def least(self) -> int:
        """Bytes of the smallest memory that can cache anything."""
        return (1 + self.layout.slot_pages + self.layout.checkpoint_pages) * self.page_bytes

    def modelled(self, memory: float) -> float:
        return self.model.hits(memory / self.page_bytes) / self.prompt_tokens

    def forecast(self, memories: Sequence[int]) -> Forecast:
        """Decide which sizes to estimate from which samples.

        Unless the rate is given, a pilot decides: one size is replayed in full and estimated from samples, each twice
        as large as those before, until they are good enough. If none is, all sizes are replayed in full.
        """
        counts = {memory: self.parts_for(memory) for memory in memories}
        if self.sampling.rate is not None:
            return Forecast(counts, 0.0, 0.0)
        candidates = sorted(memory for memory in counts if counts[memory] > 1) or sorted(counts)
        pilot = candidates[len(candidates) // 2]
        begin = time.perf_counter()
        hit_rate = self.replayed([pilot])[pilot]
        one_replay = time.perf_counter() - begin
        enough = self._good_enough(pilot, counts[pilot], hit_rate)
        counts = {memory: min(count, enough) for memory, count in counts.items()}
        processes = min(len(counts), self.sampling.jobs or os.cpu_count() or 1)
        sampled = [count for count in counts.values() if count > 1]
        part = sum(self.sampling.samples / count for count in sampled)
        whole = len(counts) - len(sampled) + min(CONCURRENT_CHECKS, len(sampled)) - (counts[pilot] == 1)
        most = len(counts) - 1 + part
        return Forecast(counts, one_replay * (whole + part) / processes, one_replay * most / processes)

    def sizes(self, memories: Sequence[int], forecast: Forecast | None = None) -> list[Size]:
        """Return the hit rate at each of these sizes in bytes."""
        counts = (forecast or self.forecast(memories)).counts
        found = dict(self._sampled(counts))
        full = self.replayed([memory for memory in memories if memory not in found])
        if self.sampling.rate is None:
            full |= self.replayed([memory for memory in found if found[memory].error > MAX_ERROR])
            full |= self._checked({memory: found[memory] for memory in found if memory not in full})
        return [
            Size(memory, full[memory], 0.0, 1.0, self.modelled(memory))
            if memory in full
            else Size(memory, found[memory].hit_rate, found[memory].error, 1 / counts[memory], self.modelled(memory))
            for memory in memories
        ]

    def parts_for(self, memory: int) -> int:
        """Return the number of parts of the trace at that size: a power of two; 1 if samples do not pay off."""
        if self.sampling.rate is not None:
            return 1 if self.sampling.rate == 1 else max(self.sampling.samples, round(1 / self.sampling.rate))
        wanted = self.prompt_tokens * self.sampling.samples / TARGET_TOKENS
        room = memory / self.page_bytes / (MEMORY_FACTOR * self._typical)
        count = 1 << max(0, int(min(wanted, room, len(self.order))).bit_length() - 1)
        while count >= 2 * self.sampling.samples:
            if len(set(self._groups(count))) >= MIN_GROUPS * count:
                return count
            count //= 2
        return 1

    def replayed(self, memories: Sequence[int]) -> dict[int, float]:
        """Return the hit rates of full replays, by size."""
        hits = self._hits("all", self.order, memories)
        return {memory: hit / self.prompt_tokens for memory, hit in zip(memories, hits, strict=True)}

    # ---- samples

    def _good_enough(self, memory: int, count: int, hit_rate: float) -> int:
        """Return the largest number of parts whose samples estimate the hit rate within MAX_ERROR; 1 if none does."""
        while count >= 2 * self.sampling.samples:
            one = dict(self._sampled({memory: count}))[memory]
            if max(one.error, abs(one.hit_rate - hit_rate)) <= MAX_ERROR:
                return count
            count //= 2
        return 1

    def _sampled(self, counts: dict[int, int]) -> Iterator[tuple[int, Estimate]]:
        for count in sorted(set(counts.values()) - {1}):
            memories = [memory for memory in counts if counts[memory] == count]
            part_of = parts(self._groups(count), count, self.sampling.seed)
            rows = [self._sample(count, part_of, part, memories) for part in range(self.sampling.samples)]
            for number, memory in enumerate(memories):
                yield memory, estimate(self.modelled(memory), [row[number] for row in rows], count)

    def _sample(self, count: int, part_of: Sequence[int], part: int, memories: Sequence[int]) -> list[Sampled]:
        """Return the hits of cache and model in one part, at sizes that correspond to those of the whole trace."""
        order = [come for come, of in zip(self.order, part_of, strict=True) if of == part]
        model = self._model(order)
        share = model.ideal / max(1, self.model.ideal)
        pages = [self._matching(model, memory, share) for memory in memories]
        hits = self._hits(f"{part} of {count}", order, [number * self.page_bytes for number in pages])
        prompts = sum(request.prompt_tokens for _, request in order)
        return [Sampled(prompts, hit, model.hits(number)) for hit, number in zip(hits, pages, strict=True)]

    def _matching(self, model: Curve, memory: int, share: float) -> int:
        """Return the pages at which the sample's model hits the same share of its ideal as the trace's model."""
        pages = memory // self.page_bytes
        hits = self.model.hits(pages)
        if hits >= self.model.ideal:
            return pages
        return max(1, min(pages, math.ceil(model.pages_for(hits * share))))

    def _checked(self, estimates: dict[int, Estimate]) -> dict[int, float]:
        """Replay in full the sizes with the largest corrections, until the replays confirm the estimates."""
        full: dict[int, float] = {}
        doubted = sorted(estimates, key=lambda memory: -abs(estimates[memory].correction))
        for at in range(0, len(doubted), CONCURRENT_CHECKS):
            now = self.replayed(doubted[at : at + CONCURRENT_CHECKS])
            full |= now
            if all(abs(now[memory] - estimates[memory].hit_rate) <= MAX_ERROR for memory in now):
                break
        return full

    # ---- parts of both

    def _groups(self, count: int) -> list[int]:
        """Return each request's group for `count` parts, with the most SESSIONS_OF_GROUP that make enough groups."""
        if count not in self._groups_for:
            requests = [request for _, request in self.order]
            for each in SESSIONS_OF_GROUP:
                found = self._groups_for[count] = groups(requests, self.layout, each * count)
                if len(set(found)) >= MIN_GROUPS * count:
                    break
        return self._groups_for[count]

    @cached_property
    def _beside(self) -> int:
        """Pages that a request takes in addition to its KV."""
        return self.layout.slot_pages + 2 * self.layout.checkpoint_pages

    @cached_property
    def _typical(self) -> float:
        """Pages of a request, averaged over prompt tokens."""
        squares = sum(request.prompt_tokens**2 for _, request in self.order)
        return squares / max(1, self.prompt_tokens) / self.layout.page_size + self._beside

    @cached_property
    def _checkpoints(self) -> float:
        """Checkpoints of a request on average with ample memory, speculative ones apart."""
        probed = self.order[:PROBED_REQUESTS]
        tokens = sum(request.known_tokens for _, request in probed)
        pages = tokens // self.layout.page_size + (8 * len(probed) + 8) * self.layout.checkpoint_pages
        ample = replace(self.setup, memory=(pages + self._beside) * self.page_bytes, eviction="lru", pool="unified")
        cache = ample.cache(ample.layout(self.trace))
        sequential = OneByOne(self.trace, cache, ample.planner(cache))
        for _, request in probed:
            sequential.serve(request)
        stats = cache.stats()
        return (stats.saved_checkpoints - stats.saved_speculative) / max(1, len(probed))

    def _model(self, order: Order) -> Curve:
        return distances(self.trace, self.layout, [request for _, request in order], self._checkpoints)

    def _hits(self, part: str, order: Order, memories: Sequence[int]) -> list[int]:
        """Return the tokens that hit in a replay of `order`, by size; those of earlier replays from the journal."""
        todo = [memory for memory in dict.fromkeys(memories) if f"{part}, {memory}" not in self._journal]
        if todo:
            requests = tuple(request for _, request in order)
            self.replayed_tokens += len(todo) * sum(request.prompt_tokens for request in requests)
            trace, setups = replace(self.trace, requests=requests), [replace(self.setup, memory=size) for size in todo]
            for number, result in run_grid(trace, setups, lambda _: TimedArrivals(order), jobs=self.sampling.jobs):
                self._journal.add(f"{part}, {todo[number]}", result.row.hit_tokens)
        return [self._journal[f"{part}, {memory}"] for memory in memories]


# -- advice --------------------------------------------------------------------

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)  # of the hits with endless memory
DOUBLED_LEVEL = 0.9  # the level whose size is doubled
STEPS = 400  # at which the curve is read, evenly spaced by ratio


@dataclass(frozen=True, slots=True)
class Step:
    """A point of the curve of hit rate over memory."""

    memory: float  # bytes
    hit_rate: float


def curve(sizes: Sequence[Size], modelled: Callable[[float], float]) -> list[Step]:
    """Return the model's curve between the estimated sizes, corrected by them, without descents."""
    logarithms, corrections = zip(*((math.log(one.memory), one.hit_rate - one.modelled) for one in sizes), strict=True)
    first, last = sizes[0].memory, sizes[-1].memory
    steps: list[Step] = []
    best = 0.0
    for number in range(STEPS + 1):
        memory = first * (last / first) ** (number / STEPS)
        correction = float(np.interp(math.log(memory), logarithms, corrections))
        best = max(best, min(1.0, modelled(memory) + correction))
        steps.append(Step(memory, best))
    return steps


def advice(steps: Sequence[Step], ideal: float) -> list[str]:
    """Return sentences: the smallest sizes that reach each level, rounded up, and the gain of doubling one."""
    if not ideal:
        return ["Nothing in this traffic begins like anything before it: no memory would help."]
    reached: dict[float, float] = {}  # memory: level
    for level in LEVELS:
        found = next((step.memory for step in steps if step.hit_rate >= level * ideal), None)
        if found is not None and round_up(found) <= round_up(steps[-1].memory):
            reached.setdefault(round_up(found), level)
    lines = []
    if reached:
        first, *rest = reached
        line = f"{spelled(first)} reach {_share(steps, first, ideal)} of infinite memory's hits"
        lines.append("; ".join([line, *(f"{spelled(size)} {_share(steps, size, ideal)}" for size in rest)]) + ".")
    if not reached or max(reached.values()) < LEVELS[-1]:
        largest = steps[-1].memory
        lines.append(f"{spelled(largest)}, the most that was tried, reach {_share(steps, largest, ideal)} of it.")
    bought = next((size for size, level in reached.items() if level >= DOUBLED_LEVEL), None)
    if bought is not None:
        gain = hit_rate(steps, 2 * bought) - hit_rate(steps, bought)
        lines.append(f"Twice as much as {spelled(bought)} would add {100 * gain:.1f} points of hit rate.")
    return lines


def hit_rate(steps: Sequence[Step], memory: float) -> float:
    """Return the hit rate at that size, or at the next smaller step."""
    return max((step.hit_rate for step in steps if step.memory <= memory), default=steps[0].hit_rate)


def round_up(memory: float) -> float:
    """Round up to two digits."""
    unit = 10.0 ** (math.floor(math.log10(memory)) - 1)
    return math.ceil(memory / unit - 1e-9) * unit


def spelled(memory: float) -> str:
    return f"{memory / 1e9:,.3g} GB" if memory < 1e12 else f"{memory / 1e9:,.0f} GB"


def _share(steps: Sequence[Step], memory: float, ideal: float) -> str:
    return f"{math.floor(100 * hit_rate(steps, memory) / ideal + 1e-9)}%"
