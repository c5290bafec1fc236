"""Prefills on other workers that are followed: which of their parts are read, and when. No threads and no I/O.

Pages for KV and state are reserved at once, before anything is computed, and are published together when the state at
the prefix's end has come, or given back. Requests that go on with the same prefix share a load, and join it when they
arrive. A load that follows is optional: it is given up if pages are short, or if nothing comes for a while, and the
requests pull or compute then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headwater.cache.prefix_cache import PrefixCache
from headwater.cache.segments.compose import is_marked
from headwater.schedule.kinds.request import Request
from headwater.schedule.tier_load import Load, Source
from headwater.schedule.tiers import Loads


def progress(cache: PrefixCache, namespace: str, key: bytes, at: int) -> tuple[int, int]:
    """Return how many tokens of a prefix of `at` tokens have KV in a cache, and `at` if its state is there, else 0."""
    match = cache.match(key, at + 1, namespace)
    return match.kv_tokens, at if match.checkpoint_tokens >= at else 0


@dataclass(eq=False, slots=True)
class Follow:
    """A prefill that is followed, until one of its requests arrives or all are cancelled."""

    peer: bytes
    namespace: str
    key: bytes  # of the index, up to `at`
    at: int  # tokens
    tier: int  # number of the tier from which its parts are read
    has_ended: bool = False  # the prefill: what is not there by then does not come
    is_cancelled: bool = False
    is_over: bool = False  # no more parts are asked for
    load: Load | None = None
    left: list[Source] = field(default_factory=list)  # parts that nothing reads yet, the state last

    @property
    def is_given_up(self) -> bool:
        """True if nothing more is to be read."""
        return self.is_cancelled or (self.load is not None and self.load.given_up)

    @property
    def is_complete(self) -> bool:
        """True if all parts are read, or are being read."""
        return self.load is not None and not self.left

    def take_ready(self, there: tuple[int, int]) -> list[Source]:
        """Return the parts that can be read now, which are left no more; `there`: `progress` of the prefix."""
        ready = [one for one in self.left if one.end <= there[one is self.left[-1]]]
        self.left = [one for one in self.left if one not in ready]
        return ready


class Follows:
    """Prefills that are followed. Guarded by the scheduler's lock."""

    def __init__(self, cache: PrefixCache, loads: Loads, new_id: Callable[[], int]) -> None:
        self._cache, self._loads, self._new_id = cache, loads, new_id
        self.open: dict[int, Follow] = {}

    def begin(self, peer: bytes, namespace: str, key: bytes, tokens: int, tier: int) -> tuple[int, Follow | None]:
        """Follow a worker's prefill of a prompt of `tokens` tokens; return a number for `cancel` and `arrived`.

        And the prefill, if its parts are to be read: not if it is followed already, since requests with the same
        prefix, as the choices of one prompt, share what is read, nor if all of it is in memory, or there are no pages.
        """
        layout, number = self._cache.layout, self._new_id()
        end = max(0, tokens - 1) // layout.unit_tokens
        if not end or is_marked(key):
            return number, None
        key = key[: end * layout.unit_bytes]
        follow = next((one for one in self.open.values() if _is_for(one, peer, namespace, key)), None)
        begun = None
        if follow is None:
            follow = Follow(peer, namespace, key, end * layout.unit_tokens, tier)
            begun = follow if self._reserve(follow) else None
            follow.is_over = begun is None
        self.open[number] = follow
        return number, begun

    def cancel(self, number: int) -> None:
        """Give a prefill up, unless another request waits for it. Unknown numbers are ignored."""
        follow = self.open.pop(number, None)
        if follow is not None and follow not in self.open.values():
            _give_up(follow)

    def arrived(self, seq: Request, number: int) -> None:
        """Let a request wait for what is read of its prefix: the prefill has ended. Unknown numbers are ignored."""
        follow = self.open.pop(number, None)
        if follow is None:
            return
        follow.has_ended = True
        if follow.load is None:
            follow.is_cancelled = True  # the request's own load begins as soon
        elif follow.load.failed is None:
            follow.load.is_awaited, seq.load = True, follow.load

    def give_up(self) -> None:
        """Give all up for which no request has come: pages are short."""
        for follow in self.open.values():
            _give_up(follow)

    def _reserve(self, follow: Follow) -> bool:
        """Begin a prefill's load. False: all of it is in memory, or there are no pages."""
        match = self._cache.match(follow.key, follow.at + 1, follow.namespace)
        if match.checkpoint_tokens >= follow.at:
            return False
        follow.load = load = self._loads.follow(follow.namespace, follow.key, follow.at, match, follow.tier)
        if load is not None:
            follow.left = [*load.sources]
        return load is not None


def _is_for(follow: Follow, peer: bytes, namespace: str, key: bytes) -> bool:
    """Return whether a prefix that is to be followed is being read already."""
    is_same = (follow.peer, follow.namespace, follow.key) == (peer, namespace, key)
    return is_same and not (follow.has_ended or follow.is_cancelled or follow.is_over)


def _give_up(follow: Follow) -> None:
    if follow.has_ended:
        return  # a request waits for it
    follow.is_cancelled = True
    if follow.load is not None and not follow.load.is_finished:
        follow.load.given_up = True
