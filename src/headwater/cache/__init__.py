"""The cache of prefixes: integers only, no torch, no clock. It can be put under any engine."""

from headwater.cache.prefix_cache import NoCache, PrefixCache

__all__ = ["NoCache", "PrefixCache"]
