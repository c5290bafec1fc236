"""Loads by name, as a user spells them; and loads with the times and lengths of another recording without content."""

from __future__ import annotations

import heapq
import math
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from headwater.cache.spelling import build
from headwater.errors import ConfigError
from headwater.traces.arrivals import (
    Arrivals,
    Closed,
    Load,
    Open,
    Poisson,
    Recorded,
    at_times,
    in_order,
    natural,
    positive,
)
from headwater.traces.azure import Azure
from headwater.traces.burst_gpt import BurstGpt
from headwater.traces.lengths import Point
from headwater.traces.request import Request, Trace
from headwater.traces.source import MALFORMED, Source, find

WINDOW_SECONDS = 600.0  # of a row of ServeGen's `trace`


class ServeGen:
    """Clients, one a line: rates in windows of 10 minutes, lengths in windows of 6 hours.

    `trace` has rows [second, requests a second, coefficient of variation, "Gamma" | "Weibull", shape, scale] of the
    gaps; `dataset` {second: {"input_tokens": {length: probability}, "output_tokens": ...}}. Arrivals are drawn: gaps of
    the fitted shape, scaled to the measured rate, which the fits of long tails miss by up to five times.
    """

    @staticmethod
    def matches(line: bytes) -> bool:
        return line.startswith(b"{") and b'"dataset"' in line and b'"trace"' in line

    @staticmethod
    def read(source: Source, seed: int) -> Iterator[Point]:
        clients = [_Client(client, random.Random(f"{seed} {number}")) for number, client in enumerate(source.records())]
        return heapq.merge(*(client.points() for client in clients), key=lambda point: point.at)


Format = type[Azure] | type[BurstGpt] | type[ServeGen]  # `matches` by a file's first line; `read` raises MALFORMED
FORMATS: dict[str, Format] = {"Azure": Azure, "BurstGPT": BurstGpt, "ServeGen": ServeGen}


class _Client:
    def __init__(self, client: dict[str, Any], rng: random.Random) -> None:
        self._rng, self._windows = rng, client["trace"]
        sets = sorted((float(second), lengths) for second, lengths in client["dataset"].items())
        self._begins = [begin for begin, _ in sets]
        self._lengths = [tuple(_Lengths(of[name]) for name in ("input_tokens", "output_tokens")) for _, of in sets]
        if not self._lengths:
            raise ValueError("dataset has 0 windows, at least 1 is needed")

    def points(self) -> Iterator[Point]:
        for begin, rate, _, distribution, shape, _ in self._windows:
            gap = GAPS[distribution](shape, self._rng)
            at = begin + gap() * self._rng.random() / rate  # a window begins in the middle of a gap
            while at < begin + WINDOW_SECONDS:
                inputs, outputs = self._lengths[max(0, bisect_right(self._begins, at) - 1)]
                yield Point(at, inputs.draw(self._rng), outputs.draw(self._rng))
                at += gap() / rate


class _Lengths:
    def __init__(self, probabilities: dict[str, float]) -> None:
        self._values = [int(length) for length in probabilities]
        self._sums = list(accumulate(probabilities.values()))

    def draw(self, rng: random.Random) -> int:
        return rng.choices(self._values, cum_weights=self._sums)[0]


def _gamma(shape: float, rng: random.Random) -> Callable[[], float]:
    return lambda: rng.gammavariate(shape, 1 / shape)


def _weibull(shape: float, rng: random.Random) -> Callable[[], float]:
    scale = 1 / math.gamma(1 + 1 / shape)
    return lambda: rng.weibullvariate(scale, shape)


GAPS: dict[str, Callable[[float, random.Random], Callable[[], float]]] = {"Gamma": _gamma, "Weibull": _weibull}


@dataclass(frozen=True, slots=True)
class Like:
    """The trace's requests, in their usual order, at the times of `file`, `speed` times as fast.

    A session's next request still waits for the answer before. `start`: seconds of the file to skip. `lengths`: answers
    get the file's lengths, too; of a known answer the part up to that length stays known. A file with too few points
    is repeated.
    """

    file: str
    speed: float = 1.0
    start: float = 0.0
    lengths: bool = False
    data: Path | None = None

    def over(self, trace: Trace, seed: int = 0) -> Arrivals:
        positive(speed=self.speed)
        requests = [request for _, request in in_order(natural(trace).over(trace, seed))]
        points = self._points(len(requests), seed)
        if self.lengths:
            requests = [_as_long(request, point) for request, point in zip(requests, points, strict=True)]
        return at_times(requests, [point.at / self.speed for point in points])

    def _points(self, count: int, seed: int) -> list[Point]:
        """Return `count` points from `start` on; the file is repeated if it has fewer."""
        source = Source(find(Path(str(self.file)), self.data))
        shape = _format_of(source)
        try:
            after = (point for point in shape.read(source, seed) if point.at >= self.start)
            points = list(islice(after, count))
        except MALFORMED as error:
            raise source.malformed(error) from error
        if not points:
            raise ConfigError(f"{source.path} has no arrivals from {self.start:g} s on: there are none to lay over")
        first, length = points[0].at, points[-1].at - points[0].at
        turn = length * len(points) / max(1, len(points) - 1) or 1.0  # with a gap behind the last
        return [
            replace(points[i % len(points)], at=points[i % len(points)].at - first + i // len(points) * turn)
            for i in range(count)
        ]


def _format_of(source: Source) -> Format:
    first = next(source.lines(), b"")
    for shape in FORMATS.values():
        if shape.matches(first):
            return shape
    raise source.error(f"{first[:60]!r} is of no format that has arrivals; there are {', '.join(FORMATS)}")


def _as_long(request: Request, point: Point) -> Request:
    known = min(request.known_tokens, request.prompt_tokens + point.output_tokens)
    return replace(request, output_tokens=point.output_tokens, known_tokens=known)


LOADS: dict[str, Callable[..., Load]] = {
    "recorded": Recorded,
    "poisson": Poisson,
    "closed": Closed,
    "open": Open,
    "like": Like,
}
NUMBER = re.compile(r"\d*\.?\d+|\d+\.")


def make_load(spelling: str, data: Path | None = None) -> Load:
    """Build a load: `2.5` (sessions a second) or a spelling of LOADS. Raises ConfigError. `data`: see read_trace."""
    if NUMBER.fullmatch(spelling.strip()):
        return Poisson(float(spelling))
    table: dict[str, Callable[..., Load]] = {**LOADS, "like": partial(Like, data=data)}
    return build("arrival", spelling, table)


def make_arrivals(trace: Trace, spelling: str | None = None, seed: int = 0, data: Path | None = None) -> Arrivals:
    """Return a trace's arrivals under a load; without one, as recorded, or as interleaved sessions if nothing is."""
    return (natural(trace) if spelling is None else make_load(spelling, data)).over(trace, seed)
