"""Loads by name, as a user spells them; and a load with the times and lengths of another recording."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from headwater.cache.spelling import build
from headwater.errors import ConfigError
from headwater.traces.arrivals import Arrivals, Closed, Load, Poisson, Recorded, at_times, in_order, natural, positive
from headwater.traces.points import FORMATS, Format, Point
from headwater.traces.request import Request, Trace
from headwater.traces.source import MALFORMED, Source, find


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


LOADS: dict[str, Callable[..., Load]] = {"recorded": Recorded, "poisson": Poisson, "closed": Closed, "like": Like}
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
