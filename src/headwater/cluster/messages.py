"""Messages of KV events: vLLM's structures in msgpack, and fields of Headwater's own, which other decoders ignore.

A batch is `[ts, events, data_parallel_rank]`. An event is a map with its name as `type`, or, up to version 0.23 of
vLLM, an array that begins with the name. Both are read, maps are written. Fields that may be unset are required by some
decoders, and missing in messages of others. Source of names and order of fields: vLLM's
`vllm/distributed/kv_events.py`.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from headwater.cache.changes import SegmentStored
from headwater.errors import HeadwaterError

DIGEST_BYTES = 8  # routers hold 64-bit block hashes
TOKEN_BYTES = 4
KV, STATES, SEGMENTS = 0, 1, 2  # groups
KINDS = {KV: "full_attention", STATES: "mamba", SEGMENTS: "segment"}  # as vLLM names the first two
KV_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
MEDIUM = "GPU"  # vLLM's name for the memory that requests resume from without loading, on a CPU, too
# others are those of stores, which are loaded first: "CPU" the host's memory below a card's, "STORAGE" a folder
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)  # number of the message that ends an answer
SNAPSHOT = b"snapshot"  # a request to the replay socket, instead of a number
HASH = (1 << 64) - 1
MAX_REPLAY_MESSAGES, MAX_REPLAY_BYTES = 10_000, 64 * 2**20  # that a publisher keeps

Hash = int | bytes


class MessageError(HeadwaterError):
    """A message is not a batch of events."""


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Adjacent blocks that were stored. Fields from `position` on are Headwater's."""

    block_hashes: Sequence[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | msgspec.UnsetType | None = msgspec.UNSET
    medium: str | msgspec.UnsetType | None = msgspec.UNSET
    lora_name: str | msgspec.UnsetType | None = msgspec.UNSET
    extra_keys: list[object] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    position: int | None = None  # tokens from the prompt's begin to the last block's end
    lifetime: bytes | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks of one group that were removed. `lifetime` is Headwater's."""

    block_hashes: Sequence[Hash]
    medium: str | msgspec.UnsetType | None = msgspec.UNSET
    group_idx: int | None = None
    lifetime: bytes | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """All blocks were removed. The fields are Headwater's, and describe what follows."""

    lifetime: bytes | None = None
    block_size: int | None = None  # tokens
    groups: dict[int, str] | None = None  # kinds; a group without blocks is among them


class _StoredArray(BlockStored, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(BlockRemoved, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _Tagged(msgspec.Struct):
    type: str


class _TaggedArray(_Tagged, array_like=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared
TAGS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")

_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(_Batch)
_maps = msgspec.msgpack.Decoder(Event)
_arrays = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_map_tags = msgspec.msgpack.Decoder(_Tagged)
_array_tags = msgspec.msgpack.Decoder(_TaggedArray)


@dataclass(frozen=True, slots=True)
class Message:
    """One batch, as bytes, and its number. In a snapshot, the number is that of the next live message."""

    number: int
    payload: bytes


def encode(ts: float, events: Iterable[Event]) -> bytes:
    """Return the payload of a batch. The rank is always there: some decoders need three fields."""
    return _encoder.encode((ts, list(events), 0))


def decode(payload: bytes) -> list[Event]:
    """Return the events of a batch, without those of unknown types. Raises MessageError."""
    try:
        raws = _batches.decode(payload).events
        events = (_event(memoryview(raw)) for raw in raws)
        return [event for event in events if event is not None]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageError(f"a message of {len(payload):,} bytes is not a batch of events: {error}") from error


def _event(raw: memoryview) -> Event | None:
    is_array = raw[0] & 0xF0 == 0x90 or raw[0] in (0xDC, 0xDD)
    try:
        event: Event = (_arrays if is_array else _maps).decode(raw)
        return event
    except msgspec.ValidationError:
        if (_array_tags if is_array else _map_tags).decode(raw).type in TAGS:
            raise
        return None


def numbers_of(blocks: Sequence[Hash]) -> Sequence[int]:
    """Return block hashes as integers of 64 bits, without a sign: of longer digests, the last eight bytes."""
    if bytes in map(type, blocks) or min(blocks, default=0) < 0:  # type: ignore[operator]
        return [int.from_bytes(one[-8:], "big") if isinstance(one, bytes) else one & HASH for one in blocks]
    return blocks  # type: ignore[return-value]


class Digests:
    """Digests of prefixes and segments under one secret key, which stand for them in messages.

    Without the key no digest can be computed: messages reveal no prompt, and a guessed prompt cannot be tested. A
    digest, of a unit of the index key, covers the one before it, and the first one the namespace, so that an edge is
    hashed without its ancestors.
    """

    def __init__(self, key: bytes, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        self._unit, self._root, self._segment = (
            hashlib.blake2b(digest_size=DIGEST_BYTES, key=key, person=b"headwater " + kind)
            for kind in (b"unit", b"root", b"part")
        )

    def root(self, namespace: str) -> int:
        """Return the digest that stands before a prefix's first unit."""
        return _digest(self._root, [namespace.encode(errors="surrogatepass")])

    def after(self, before: int, edge: bytes) -> list[int]:
        """Return the digests of the units of `edge`, which continue a prefix with the digest `before`."""
        digests, width, begun = list[bytes](), self.unit_bytes, self._unit
        running = before.to_bytes(DIGEST_BYTES, "big")
        for at in range(0, len(edge) - width + 1, width):
            unit = begun.copy()
            unit.update(running + edge[at : at + width])
            running = unit.digest()
            digests.append(running)
        return list(struct.unpack(f">{len(digests)}Q", b"".join(digests)))

    def prefix(self, namespace: str, key: bytes) -> list[int]:
        """Return the digest of each prefix of an index key that is 1, 2, … whole units long."""
        return self.after(self.root(namespace), key)

    def prompt(self, tokens: Sequence[int], namespace: str = "") -> list[int]:
        """Return the digests of a prompt's full units."""
        return self.prefix(namespace, array("I", tokens).tobytes())

    def segment(self, stored: SegmentStored) -> int:
        """Return the digest of a segment, which has no place in a prefix."""
        widths = b"".join(width.to_bytes(4, "big") for width in (stored.head, stored.tail))
        return _digest(self._segment, [widths, stored.namespace.encode(errors="surrogatepass"), stored.ids])


def _digest(begun: hashlib.blake2b, parts: Iterable[bytes]) -> int:
    """Return the digest of parts, each after its length, so that no other parts have the same bytes."""
    running = begun.copy()
    for part in parts:
        running.update(len(part).to_bytes(8, "big"))
        running.update(part)
    return int.from_bytes(running.digest(), "big")
