"""Recordings of times and lengths without content: Azure's inference traces and ServeGen's client profiles."""

from __future__ import annotations

import csv
import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Any

from headwater.traces.source import Source

WINDOW = 600.0  # seconds that a row of ServeGen's `trace` stands for


@dataclass(frozen=True, slots=True)
class Point:
    """Time and lengths of one request."""

    at: float  # seconds from the recording's beginning
    input_tokens: int
    output_tokens: int


class Azure:
    """A CSV with TIMESTAMP, ContextTokens, GeneratedTokens: as recorded, from 0 seconds on. Nothing is drawn."""

    @staticmethod
    def matches(line: bytes) -> bool:
        return line.startswith(b"TIMESTAMP,")

    @staticmethod
    def read(source: Source, seed: int) -> Iterator[Point]:
        begin: float | None = None
        for row in csv.DictReader(line.decode() for line in source.lines()):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()  # without the last digit
            begin = at if begin is None else begin
            yield Point(at - begin, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


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


Format = type[Azure] | type[ServeGen]  # `matches` by a file's first line; `read` raises MALFORMED errors
FORMATS: dict[str, Format] = {"Azure": Azure, "ServeGen": ServeGen}


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
            while at < begin + WINDOW:
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
