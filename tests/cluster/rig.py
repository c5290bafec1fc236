"""A toy cache, the stream of its messages, and what a reader should know of it."""

from collections.abc import Sequence
from dataclasses import replace

from headwater.cache.changes import ChangeLog
from headwater.cache.prefix_cache import PrefixCache
from headwater.cluster.ledger import EventStream, Ledger, PlainTokens, Tokens
from headwater.cluster.messages import KV, SEGMENTS, STATES, Digests, Message
from headwater.cluster.store_ledger import StoreLedger
from headwater.plan import CacheLayout
from tests.cache.toy import LAYOUT, Toy

KEY = bytes(range(32))
DIGESTS = Digests(KEY, LAYOUT.unit_bytes)
TIGHT = replace(LAYOUT, n_pages=12)


def logged(layout: CacheLayout = LAYOUT, eviction: str = "lru") -> Toy:
    """Return a toy whose cache logs its changes."""
    return Toy(layout, eviction, ChangeLog())


def stream_of(
    toy: Toy, lifetime: bytes = b"A" * 16, with_tokens: bool = False, stores: Sequence[StoreLedger] = ()
) -> EventStream:
    """Return a stream that has published nothing yet."""
    tokens = PlainTokens(toy.layout.unit_bytes) if with_tokens else Tokens()
    return EventStream(Ledger(toy.layout, DIGESTS, tokens), lifetime, lambda: 1.5, stores)


def begun(toy: Toy, stream: EventStream) -> Message:
    """Return the message with all that a toy holds; changes until now are in it."""
    toy.cache.changes.take()
    return stream.begin(toy.cache.contents())


def stepped(toy: Toy, stream: EventStream) -> list[Message]:
    """Return the message of the changes since the last one, if there are any."""
    changes = toy.cache.changes.take()
    return [stream.step(changes)] if changes else []


def held(cache: PrefixCache) -> dict[int, set[int]]:
    """Return the digests of all that a cache holds, by group, from its index itself."""
    found: dict[int, set[int]] = {KV: set(), STATES: set(), SEGMENTS: set()}
    index = cache.index
    for node in index:
        digests = DIGESTS.prefix(index.namespace(node), index.key_of(node))
        if index.unit_pages:
            found[KV].update(digests)
        if node.checkpoint:  # it has pages
            found[STATES].add(digests[-1])
    found[SEGMENTS] = {DIGESTS.segment(stored.as_change) for stored in cache.segments if stored.ready}
    return found
