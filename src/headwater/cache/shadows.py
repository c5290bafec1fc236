"""Shadow caches: the hits of several eviction policies, each alone with the same memory and the same requests.

A shadow is a cache without contents. Its keys have 8 bytes in place of each unit: a hash of all units up to there, so
that 8 bytes stand for a whole prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from headwater.cache.changes import Changes
from headwater.cache.node import Node
from headwater.cache.order.ghosts import prefix_ids
from headwater.errors import OutOfPages
from headwater.plan import CacheLayout, Draft, Match, Plan

ID_BYTES = 8
REQUEST = 0  # id of the one request that a shadow has at a time


class Cache(Protocol):
    """A prefix cache, as far as a shadow uses it."""

    def match(self, key: bytes, length: int, namespace: str) -> Match: ...

    def reserve(self, draft: Draft, match: Match) -> Plan: ...

    def commit(self, plan: Plan) -> None: ...

    def release(self, request: int) -> None: ...

    def end_conversation(self, namespace: str, key: bytes, after: int) -> None: ...


NewCache = Callable[[str, CacheLayout, Changes], Cache]


class Holders:
    """For the id of a prefix, the shadows that have a checkpoint at its end: a number with a bit for each."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}
        self.listener: Callable[[int, int], None] = lambda prefix, bits: None  # called with what has changed

    def flip(self, prefix: int, bit: int) -> None:
        """Note that a shadow has got or lost its checkpoint."""
        bits = self.of.pop(prefix, 0) ^ bit
        if bits:
            self.of[prefix] = bits
        self.listener(prefix, bits)


class Shadow(Changes):
    """One policy's cache."""

    def __init__(self, new: NewCache, spelling: str, layout: CacheLayout, holders: Holders, bit: int) -> None:
        self._unit, self._holders, self._bit = layout.unit_tokens, holders, bit
        self._of_page: dict[int, int] = {}  # id of the prefix by its checkpoint's first page
        self.cache = new(spelling, layout, self)

    def checkpoint_stored(self, node: Node, unit_pages: int) -> None:
        assert node.checkpoint is not None, f"{node} has no checkpoint"
        prefix = int.from_bytes(node.edge[-ID_BYTES:], "little", signed=True)
        self._of_page[node.checkpoint[0]] = prefix
        self._holders.flip(prefix, self._bit)

    def removed(self, pages: Sequence[int], each: int) -> None:
        prefix = self._of_page.pop(pages[0], None) if len(pages) else None
        if prefix is not None:
            self._holders.flip(prefix, self._bit)

    def serve(self, draft: Draft, is_first: bool) -> int:
        """Compute what a leg computes, but from this cache's own checkpoint on; return where it resumes.

        Positions are those of the real leg, and the one at which that one resumes.
        """
        known = len(draft.key) // ID_BYTES * self._unit
        match = self.cache.match(draft.key, max(draft.end, known), draft.namespace)
        start = match.checkpoint_tokens
        if start >= draft.publish and not is_first:
            return start
        wanted = {*draft.checkpoints, draft.start} if is_first else set(draft.checkpoints)
        own = replace(
            draft,
            request=REQUEST,
            counts=draft.counts and is_first,
            start=start,
            end=max(draft.end, start + 1),
            checkpoints=tuple(sorted(at for at in wanted if start < at <= draft.publish)),
            speculative=tuple(at for at in draft.speculative if at > start),
            publish=max(draft.publish, start),
        )
        try:
            self.cache.commit(self.cache.reserve(own, match))
        except OutOfPages:
            return 0
        self.cache.release(REQUEST)
        return start


class Shadows:
    """The caches of several policies, and which of them has had the most hits of late.

    A request's hit tokens count 1/e after `window` further requests.
    """

    def __init__(self, new: NewCache, spellings: Sequence[str], layout: CacheLayout, window: float) -> None:
        self.unit_bytes, self._decay = layout.unit_bytes, math.exp(-1 / window)
        self.holders = Holders()
        own = replace(layout, unit_bytes=ID_BYTES)
        self._all = [Shadow(new, name, own, self.holders, 1 << bit) for bit, name in enumerate(spellings)]
        self.hits = [0.0] * len(spellings)
        self.best = 0  # number of the policy to follow

    def expect(self, draft: Draft, is_first: bool) -> None:
        """Serve a leg that is going to be computed, in all shadows."""
        if not draft.reuse:
            return
        own = self._translated(draft)
        resumed = [shadow.serve(own, is_first) for shadow in self._all]
        if is_first and draft.counts:
            self.count(resumed)

    def count(self, resumed: Sequence[int]) -> None:
        """Count the tokens at which a request resumes in each shadow, and change to the best if it is ahead."""
        self.hits = [self._decay * hits + at for hits, at in zip(self.hits, resumed, strict=True)]
        most = max(self.hits)
        if most > self.hits[self.best]:
            self.best = self.hits.index(most)

    def _translated(self, draft: Draft) -> Draft:
        ids = prefix_ids(draft.key, self.unit_bytes, hash(draft.namespace))
        return replace(draft, key=ids.tobytes(), retained=(), priority=0, spares=None)

    def end_conversation(self, namespace: str, key: bytes, after: int) -> None:
        """Pass the end of a conversation on to all shadows."""
        ids = prefix_ids(key, self.unit_bytes, hash(namespace)).tobytes()
        for shadow in self._all:
            shadow.cache.end_conversation(namespace, ids, after)
