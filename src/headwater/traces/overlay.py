"""Times and lengths of one recording laid over the sessions of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from headwater.errors import ConfigError
from headwater.traces import azure, servegen
from headwater.traces.arrivals import Arrivals, at_times, in_order, natural, positive
from headwater.traces.place import find
from headwater.traces.point import Point
from headwater.traces.request import Request, Trace
from headwater.traces.source import MALFORMED, Source

# whether a file that begins like this has the format, and its points, of which some may be drawn from a seed
Shape = tuple[Callable[[bytes], bool], Callable[[Source, int], Iterator[Point]]]
SHAPES: dict[str, Shape] = {"Azure": (azure.matches, azure.points), "ServeGen": (servegen.matches, servegen.points)}


@dataclass(frozen=True, slots=True)
class Like:
    """The trace's requests, in the order in which they would come otherwise, at the times of `file`, `speed` times as
    fast. A session's next request still waits for the answer before.

    `start`: seconds of the file to leave out. `lengths`: answers are as long as the file's, too; what a trace knows of
    an answer is known up to that length. A file that has too few goes on from its beginning.
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
        """`count` of them from `start` on, as often as it takes."""
        source = Source(find(Path(str(self.file)), self.data))
        read = _shape(source)
        try:
            after = (point for point in read(source, seed) if point.at >= self.start)
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


def _shape(source: Source) -> Callable[[Source, int], Iterator[Point]]:
    first = next(source.lines(), b"")
    for matches, points in SHAPES.values():
        if matches(first):
            return points
    raise source.error(f"{first[:60]!r} is of no format that has arrivals; there are {', '.join(SHAPES)}")


def _as_long(request: Request, point: Point) -> Request:
    known = min(request.known_tokens, request.prompt_tokens + point.output_tokens)
    return replace(request, output_tokens=point.output_tokens, known_tokens=known)
