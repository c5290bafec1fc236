"""Segments that are being built: their legs are plans that are committed or abandoned as all others are."""

from __future__ import annotations

from headwater.cache.segments.store import SegmentKey, SegmentStore, StoredSegment
from headwater.errors import PlanClosed
from headwater.plan import Build, Plan


class Builds:
    """Segments under construction, one a request, and their open plans."""

    def __init__(self, segments: SegmentStore) -> None:
        self._segments = segments
        self._stored: dict[int, StoredSegment] = {}  # by request
        self._open: dict[int, int] = {}  # plan id: its request
        self._ids = 0

    def __contains__(self, request: int) -> bool:
        return request in self._stored

    def begin(self, request: int, key: SegmentKey) -> StoredSegment:
        """Take the pages of a segment; room for them has been made."""
        stored = self._stored[request] = self._segments.open(key)
        return stored

    def leg(self, request: int, start: int, end: int) -> Plan:
        """Return the plan that computes tokens [start, end) of the segment. ValueError if another plan is open."""
        if request in self._open.values():
            raise ValueError(f"request {request} has a plan open")
        stored, layout = self._stored[request], self._segments.layout
        widths = stored.key.widths
        self._ids += 1
        self._open[self._ids] = request
        return Plan(
            id=self._ids,
            request=request,
            start=start,
            end=end,
            restore=(),
            table=stored.kv,
            write_from=start // layout.page_size,
            saves=(),
            lent=stored.lent if start == 0 else (),
            build=Build(widths.head, stored.state, stored.transition, end == stored.key.tokens - widths.tail),
        )

    def commit(self, plan: Plan, now: int) -> bool:
        """Close the plan; the last one publishes the segment at tick `now`. Returns whether it did."""
        stored = self._stored[self._close(plan)]
        assert plan.build is not None, f"plan {plan.id} builds no segment"
        if plan.build.is_last:
            self._segments.publish(stored, now)
        return plan.build.is_last

    def abandon(self, plan: Plan) -> None:
        """Close the plan. The segment is incomplete: release the request."""
        self._close(plan)

    def _close(self, plan: Plan) -> int:
        if plan.id not in self._open:
            raise PlanClosed(f"plan {plan.id} of request {plan.request} is not open")
        return self._open.pop(plan.id)

    def release(self, request: int) -> None:
        """Forget the request; an incomplete segment is dropped. ValueError if a plan is open."""
        if request in self._open.values():
            raise ValueError(f"request {request} has a plan open")
        stored = self._stored.pop(request)
        if not stored.ready:
            self._segments.drop(stored)
