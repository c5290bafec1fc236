"""Requests one after the other through the server's scheduler, which has segments made before it composes them."""

from __future__ import annotations

from headwater.account import CacheAccount
from headwater.cache import PrefixCache
from headwater.errors import OutOfPages, RequestTooLarge
from headwater.lab.replayed import Replayed
from headwater.lab.segment_work import SegmentWork
from headwater.lab.setup import Setup, as_reused
from headwater.schedule.limits import Limits
from headwater.traces.request import Request, Trace

ENDLESS = 1 << 60


class Scheduled:
    """Each has the whole machine: steps are as long as they need to be, and its answer takes none."""

    def __init__(self, trace: Trace, setup: Setup, cache: PrefixCache) -> None:
        self._trace, self._reuse = trace, setup.reuse
        limits = Limits(1, ENDLESS, ENDLESS, ENDLESS, ENDLESS, ENDLESS)
        self.scheduler = setup.scheduler(cache, limits)
        self.work = SegmentWork(cache.layout.flops)
        self.last = 0  # id of the request that was served last

    def serve(self, request: Request) -> CacheAccount | None:
        """Its prompt, and what was answered as far as it is known. None: it does not fit into the memory at all."""
        seq = Replayed(self.scheduler.new_id(), self._trace, as_reused(request, self._reuse))
        self.last = seq.id
        try:
            self.scheduler.enqueue(seq)
        except RequestTooLarge:
            return None
        while not self.scheduler.idle:
            step = self.scheduler.plan_step()
            self.work.note(step)
            for done in self.scheduler.finish_step(step):
                self.scheduler.finish(done)
            for failed, error in self.scheduler.failures:
                if not isinstance(error, OutOfPages):
                    raise error
                if failed is seq:
                    seq.account = None
            self.scheduler.failures.clear()
        return seq.account
