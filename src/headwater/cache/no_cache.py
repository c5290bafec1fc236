"""Caching that is off."""

from __future__ import annotations

from dataclasses import replace

from headwater.cache.prefix_cache import PrefixCache
from headwater.types import Draft, Match, Plan, Reason


class NoCache(PrefixCache):
    """Finds nothing and publishes nothing: all pages are the request's own until its release."""

    def match(self, key: bytes, length: int, namespace: str = "") -> Match:
        return Match(0, 0, 0, Reason.CACHE_OFF)

    def reserve(self, draft: Draft) -> Plan:
        return super().reserve(replace(draft, reuse=False, checkpoints=(), speculative=(), replaces=None))
