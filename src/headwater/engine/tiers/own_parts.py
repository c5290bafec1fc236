"""Prefixes and segments in an engine's memory, as parts that other workers of its cluster read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from headwater.cache.segments.compose import is_marked
from headwater.cache.segments.store import SegmentKey, StoredSegment
from headwater.engine.runner import Runner
from headwater.engine.tiers.prefix import PrefixParts
from headwater.plan import Held
from headwater.schedule.follows import progress
from headwater.schedule.scheduler import Scheduler
from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.names import STATE, Names
from headwater.tiers.part import Buffer, Part, Prefix, Sealer


class OwnParts:
    """Parts of cached prefixes, and stored segments. Their pages are not evicted while they are read.

    Methods are for any thread.

    A read does not count as a use: the worker that reads has a copy then, and if requests go there from now on, this
    one is evicted as any prefix that is not used.
    """

    def __init__(
        self,
        key: bytes,
        fingerprint: Fingerprint,
        scheduler: Scheduler,
        runner: Runner,
        changed: threading.Condition,
        prefill_seconds: Callable[[int], float | None],
        part_of: Callable[[StoredSegment], Callable[[], Part]],
    ) -> None:
        """`key`: the secret one of names and digests; `runner`: with the arena; `changed`: the engine's lock.

        `part_of`: makes a segment's part.
        """
        self._scheduler, self._cache, self._changed = scheduler, scheduler.cache, changed
        self._sealer = Sealer(key)
        self._part_of = part_of
        self._names = Names(key, fingerprint.digest, scheduler.layout.unit_bytes)
        self._prefixes = PrefixParts(self._names, scheduler.layout, runner, prefill_seconds)
        self.reading = 0  # prefixes and segments whose pages are kept from eviction now
        self.sent = 0  # parts

    def find(self, namespace: str, key: bytes, tokens: int) -> Prefix | None:
        """Return the deepest prefix from whose state, or tail, a prompt of `tokens` tokens can resume, or None.

        `key`: the prompt's, of the index.
        """
        if is_marked(key):
            return None  # approximate prefixes have no parts
        with self._changed:
            at = self._cache.match(key, tokens, namespace).checkpoint_tokens
        layout = self._scheduler.layout
        with self._held(namespace, key, at) as held:
            if held is None:
                return None
            ids = b"".join(tail.ids for tail in held.tails[:1])
            key = key[: at // layout.unit_tokens * layout.unit_bytes] + ids
            return self._prefixes.prefix(namespace, key, at, replace(held, tails=held.tails[:1]))

    def follow(self, namespace: str, key: bytes, at: int) -> Prefix | None:
        """Return the prefix `key` of `at` tokens, whose parts may be computed later; None if it has no parts."""
        return None if is_marked(key) else self._prefixes.prefix(namespace, key, at, None)

    def progress(self, prefix: Prefix) -> tuple[int, int]:
        """Return how many tokens of a prefix have KV, and its length if its state is cached, else 0."""
        with self._changed:
            return progress(self._cache, prefix.namespace, prefix.key, prefix.at)

    @contextmanager
    def sealed(self, prefix: Prefix, part: int) -> Iterator[list[Buffer] | None]:
        """Yield the bytes of a part in pieces, or None if it is not there.

        Pieces are as they were stored until the context ends; on a card, until this thread's next call, too.
        """
        place = prefix.places[part]
        with_state = place.kind == STATE or place.of_tail
        at = prefix.at if with_state else place.end * self._scheduler.layout.unit_tokens
        with self._held(prefix.namespace, prefix.key, at, with_state) as held:
            made = None if held is None else self._prefixes.part(prefix, part, held)
            self.sent += made is not None
            yield None if made is None else self._sealer.seal(place.name, made)

    @contextmanager
    def _held(self, namespace: str, key: bytes, at: int, with_state: bool = True) -> Iterator[Held | None]:
        """Keep pages of a prefix from eviction, and yield them; None if they are not cached.

        `with_state`: a state is at its end, and is kept, too.
        """
        with self._changed:
            id = self._scheduler.new_id()
            held = None if is_marked(key) else self._cache.hold(id, namespace, key, at, with_state)
            self.reading += held is not None
        if held is None:
            yield None
            return
        try:
            yield held
        finally:
            with self._changed:
                self._cache.release(id)
                self._was_read()

    @contextmanager
    def sealed_segment(self, key: bytes) -> Iterator[list[Buffer] | None]:
        """Yield the bytes of a segment, by its encoded key, as `sealed`; None if it is not stored, or not complete."""
        with self._changed:
            stored = self._cache.segments.find(SegmentKey.decoded(key))
            if stored is not None and stored.ready:
                self._cache.segments.pin(stored)
                self.reading += 1
            else:
                stored = None
        if stored is None:
            yield None
            return
        try:
            self.sent += 1
            yield self._sealer.seal(self._names.segment(key), self._part_of(stored)())
        finally:
            with self._changed:
                self._cache.segments.unpin(stored)
                self._was_read()

    def _was_read(self) -> None:
        """Note that pages can be evicted again."""
        self.reading -= 1
        self._scheduler.room_was_made()
        self._changed.notify_all()
