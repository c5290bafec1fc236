"""The cache of prefixes: integers only, no torch, no clock. It can be put under any engine."""

from headwater.cache.no_cache import NoCache
from headwater.cache.prefix_cache import PrefixCache

__all__ = ["NoCache", "PrefixCache"]
