"""Prefixes in an engine's own memory, as parts of tiers: other workers of its cluster read them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headwater.cache.segments.compose import is_marked
from headwater.engine.runner import Runner
from headwater.engine.tier_prefix import PrefixParts
from headwater.plan import Held
from headwater.schedule.scheduler import Scheduler
from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.names import Names
from headwater.tiers.part import Buffer, Part, Sealer


class OwnParts:
    """Parts of cached prefixes. Their pages are not evicted while they are read. Methods are for any thread.

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
    ) -> None:
        """`key`: the secret one of names and digests; `runner`: with the arena; `changed`: the engine's lock."""
        self._scheduler, self._cache, self._changed = scheduler, scheduler.cache, changed
        self._sealer = Sealer(key)
        names = Names(key, fingerprint.digest, scheduler.layout.unit_bytes)
        self._prefixes = PrefixParts(names, scheduler.layout, runner, prefill_seconds)
        self.reading = 0  # prefixes whose pages are kept from eviction now
        self.sent = 0  # parts

    def find(self, namespace: str, key: bytes, tokens: int) -> tuple[int, list[str]]:
        """Return the deepest position at which a prompt of `tokens` tokens can resume, and the names of its parts.

        `key`: the prompt's, of the index. Position 0 has no parts.
        """
        if is_marked(key):
            return 0, []  # approximate prefixes have no parts
        with self._changed:
            at = self._cache.match(key, tokens, namespace).checkpoint_tokens
        if not at:
            return 0, []
        with self._held(namespace, key, at) as parts:
            return at, list(parts)

    @contextmanager
    def sealed(self, namespace: str, key: bytes, at: int, name: str) -> Iterator[list[Buffer] | None]:
        """Yield the bytes of a part of the prefix that ends at `at`, in pieces, or None if it is not there.

        Pieces are as they were stored until the context ends; on a card, until this thread's next call, too.
        """
        with self._held(namespace, key, at) as parts:
            make = parts.get(name)
            self.sent += make is not None
            yield None if make is None else self._sealer.seal(name, make())

    @contextmanager
    def _held(self, namespace: str, key: bytes, at: int) -> Iterator[dict[str, Callable[[], Part]]]:
        """Yield the parts of a prefix by name; none if it is not cached."""
        layout = self._scheduler.layout
        prefix = key[: at // layout.unit_tokens * layout.unit_bytes]
        with self._changed:
            id = self._scheduler.new_id()
            held: Held | None = None if is_marked(prefix) else self._cache.hold(id, namespace, prefix, at)
            self.reading += held is not None
        if held is None:
            yield {}
            return
        try:
            yield dict(self._prefixes.parts(namespace, prefix, at, held))
        finally:
            with self._changed:
                self._cache.release(id)
                self.reading -= 1
                self._scheduler.room_was_made()
                self._changed.notify_all()
