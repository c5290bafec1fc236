"""Requests that wait hold no segments: nobody else could have the memory."""

from collections.abc import Callable

import pytest

from headwater.cache.placement import make_placement
from headwater.cache.prefix_cache import PrefixCache
from headwater.errors import RequestTooLarge
from headwater.plan import CacheLayout
from headwater.request import Fidelity, Generation, SamplingParams, Span
from headwater.schedule.kinds.request import Request
from headwater.schedule.kinds.segment import Composer
from headwater.schedule.limits import Limits
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import Phase

PAGE, PAGES = 16, 60
TWO = SamplingParams(max_tokens=2)
LEADING, DOCUMENT = range(1000, 1128), range(5000, 5100)


def layout(pages: int = PAGES) -> CacheLayout:
    sizes = {"page_size": PAGE, "unit_tokens": PAGE, "unit_bytes": 4 * PAGE, "checkpoint_pages": 2, "slot_pages": 2}
    return CacheLayout(n_pages=pages, state_fraction=None, transition_pages=2, **sizes)


class Rig:
    """A scheduler whose model says 7."""

    def __init__(self) -> None:
        self.cache = PrefixCache(layout(), "lru")
        limits = Limits(8, 256, 16, 10_000)
        placement = make_placement("structural")
        self.scheduler = Scheduler(self.cache, placement, limits, composer=Composer(self.cache, conv_taps=4))

    def ask(self, leading: range, question: range) -> Request:
        prompt = (*leading, *DOCUMENT, *question)
        span = Span(len(leading), len(leading) + len(DOCUMENT))
        return self.scheduler.submit(Generation(prompt, TWO, segments=(span,), fidelity=Fidelity.FAST))

    def step(self) -> None:
        for seq in self.scheduler.finish_step(self.scheduler.plan_step()):
            seq.tokens.append(7)
            if seq.n_output == TWO.max_tokens:
                self.scheduler.finish(seq)
        self.cache.check()

    def run(self) -> None:
        for _ in range(500):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError("it is not idle after 500 steps")

    @property
    def pins(self) -> int:
        return sum(stored.pins for stored in self.cache.segments)

    def follower(self) -> Request:
        """Return a request that waits for another, which computes the same leading part; their document is stored."""
        self.ask(range(3000, 3032), range(1, 4))
        self.run()
        assert len(self.cache.segments) == 1
        self.ask(LEADING, range(9000, 9040))
        waits = self.ask(LEADING, range(8000, 8040))
        self.step()
        assert waits.phase is Phase.WAITING
        assert waits.waited
        return waits


def gone(rig: Rig, seq: Request) -> None:
    rig.scheduler.cancel(seq)


def given_up(rig: Rig, seq: Request) -> None:
    rig.scheduler.give_up(seq, RequestTooLarge("its time is over"))
    rig.scheduler.failures.clear()


def served(rig: Rig, seq: Request) -> None:
    rig.run()
    assert seq.phase is Phase.DONE
    assert seq.account is not None
    assert seq.account.approximate_tokens > 0  # what it waited for


@pytest.mark.parametrize("end", [gone, given_up, served])
def test_waiting_request_holds_no_segments(end: Callable[[Rig, Request], None]) -> None:
    rig = Rig()
    waits = rig.follower()
    assert waits.composition is None
    end(rig, waits)
    rig.run()
    assert rig.pins == 0
    large = rig.scheduler.submit(Generation(tuple(range(20_000, 20_000 + (PAGES - 2) * PAGE - 4)), TWO))
    rig.run()
    assert large.phase is Phase.DONE
    assert large.n_output == 2
    assert not rig.scheduler.failures
