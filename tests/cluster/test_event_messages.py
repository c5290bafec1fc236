"""Messages of KV events: their bytes, and what another engine's decoder reads."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.cluster import messages
from headwater.cluster.messages import KV, SEGMENTS, STATES, BlockStored, MessageError, decode, encode, numbers_of
from tests.cache.toy import PAGE, words
from tests.cluster.rig import DIGESTS, TIGHT, begun, logged, stepped, stream_of

OLD, NEW = True, False  # events as arrays, as maps


def vllm(array_like: bool) -> Any:
    """Return vLLM's batch; its events are arrays (up to 0.23) or maps."""

    class Event(msgspec.Struct, array_like=array_like, omit_defaults=True, gc=False, tag=True):
        pass

    class BlockStored(Event):
        block_hashes: list[int | bytes]
        parent_block_hash: int | bytes | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None
        lora_name: str | None
        extra_keys: list[tuple[Any, ...] | None] | None = None
        group_idx: int | None = None
        kv_cache_spec_kind: str | None = None
        kv_cache_spec_sliding_window: int | None = None

    class BlockRemoved(Event):
        block_hashes: list[int | bytes]
        medium: str | None
        group_idx: int | None = None

    class AllBlocksCleared(Event):
        pass

    class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
        ts: float
        events: list[BlockStored | BlockRemoved | AllBlocksCleared]
        data_parallel_rank: int | None = None

    return KVEventBatch, BlockStored, BlockRemoved, AllBlocksCleared


def payloads() -> list[bytes]:
    """Return messages of every kind: a beginning, stores, removals, a heartbeat, a snapshot."""
    toy = logged(TIGHT)
    stream = stream_of(toy)
    sent = [begun(toy, stream)]
    for seed in (1, 2, 3):
        toy.serve(words(seed, 5 * PAGE + 1))
        sent += stepped(toy, stream)
    sent.append(stream.heartbeat())
    return [message.payload for message in (*sent, *stream.snapshot())]


def test_vllm_decoder_reads_published_events_and_ignores_added_fields() -> None:
    batch, stored, removed, cleared = vllm(NEW)
    seen = []
    for payload in payloads():
        decoded = msgspec.msgpack.decode(payload, type=batch)
        assert (decoded.ts, decoded.data_parallel_rank) == (1.5, 0)
        assert decoded.events
        seen += [type(event) for event in decoded.events]
        for theirs, ours in zip(decoded.events, decode(payload), strict=True):
            names = theirs.__struct_fields__
            assert [getattr(theirs, name) for name in names] == [getattr(ours, name) for name in names]
    assert set(seen) == {stored, removed, cleared}


def test_an_event_has_the_fields_that_readers_of_states_need() -> None:
    toy = logged()
    stream = stream_of(toy)
    first = begun(toy, stream)
    prompt = words(1, 4 * PAGE + 1)
    toy.serve(prompt, (2 * PAGE, 4 * PAGE))
    (message,) = stepped(toy, stream)
    blocks = DIGESTS.prompt(prompt)
    kinds = {KV: "full_attention", STATES: "mamba", SEGMENTS: "segment"}
    assert msgspec.msgpack.decode(first.payload, strict=False)[1] == [
        {"type": "AllBlocksCleared", "lifetime": b"A" * 16, "block_size": PAGE, "groups": kinds}
    ]
    kv = {"token_ids": [], "block_size": PAGE, "lora_id": None, "medium": "GPU", "lora_name": None}
    ours = [
        {"block_hashes": blocks[:2], "parent_block_hash": None, "group_idx": 0, "position": 2 * PAGE},
        {"block_hashes": blocks[2:], "parent_block_hash": blocks[1], "group_idx": 0, "position": 4 * PAGE},
        {"block_hashes": [blocks[1]], "parent_block_hash": blocks[0], "group_idx": 1, "position": 2 * PAGE},
        {"block_hashes": [blocks[3]], "parent_block_hash": blocks[2], "group_idx": 1, "position": 4 * PAGE},
    ]
    expected = [{"type": "BlockStored", **kv, **one, "kv_cache_spec_kind": kinds[one["group_idx"]]} for one in ours]
    expected[0]["lifetime"] = b"A" * 16
    found = msgspec.msgpack.decode(message.payload)[1]
    assert sorted(found, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("array_like", [OLD, NEW])
def test_vllms_arrays_and_maps_are_read(array_like: bool) -> None:
    batch, stored, removed, cleared = vllm(array_like)
    digest = bytes(range(32))
    events = [
        cleared(),
        stored([1, digest], None, [5, 6], 1, None, "GPU", None, [None, ("salt",)], 2, "mamba", None),
        stored([3], digest, [7], 1, None, "GPU", None),
        removed([1], "GPU", 2),
        removed([3], "GPU"),
    ]
    sent = msgspec.msgpack.encode(batch(1.0, events, 0))
    first, second, third, fourth, fifth = decode(sent)
    assert isinstance(first, messages.AllBlocksCleared)
    assert isinstance(second, messages.BlockStored)
    assert list(numbers_of(second.block_hashes)) == [1, int.from_bytes(digest[-8:], "big")]
    assert (second.group_idx, second.kv_cache_spec_kind, second.position, second.lifetime) == (2, "mamba", None, None)
    assert isinstance(third, messages.BlockStored)
    assert (third.parent_block_hash, third.group_idx) == (digest, None)
    assert isinstance(fourth, messages.BlockRemoved)
    assert (fourth.group_idx, fifth.group_idx) == (2, None)


def test_sglangs_shorter_events_and_signed_hashes_are_read() -> None:
    stored = {"block_hashes": [-1], "parent_block_hash": None, "token_ids": [], "block_size": 64, "lora_id": None}
    maps = [0.5, [{"type": "BlockStored", **stored}, {"type": "BlockRemoved", "block_hashes": [-1]}], None]
    arrays = [0.5, [["BlockStored", [-1], None, [], 64, None], ["BlockRemoved", [-1]], ["AllBlocksCleared"]]]
    for batch in (maps, arrays):
        stored, removed, *_ = decode(msgspec.msgpack.encode(batch))
        assert [*numbers_of(stored.block_hashes), *numbers_of(removed.block_hashes)] == [2**64 - 1] * 2


@pytest.mark.parametrize("event", [{"type": "BlockMoved", "to": 1}, ["BlockMoved", 1]])
def test_events_of_unknown_types_are_passed_over(event: Any) -> None:
    assert len(decode(msgspec.msgpack.encode([0.5, [event, {"type": "AllBlocksCleared"}], 0]))) == 1


@pytest.mark.parametrize(
    "batch",
    [b"", b"\xc1", [1], [0.5, 7], [0.5, [{"type": "BlockStored"}], 0], [0.5, [["BlockRemoved", "x"]], 0], [0.5, [[]]],
     [0.5, [{"type": "BlockRemoved", "block_hashes": ["x"]}]], [0.5, [3]], {"ts": 0.5}],
)  # fmt: skip
def test_malformed_batch_is_one_error(batch: Any) -> None:
    with pytest.raises(MessageError, match="not a batch of events"):
        decode(batch if isinstance(batch, bytes) else msgspec.msgpack.encode(batch))


def test_the_rank_is_always_there() -> None:
    assert len(msgspec.msgpack.decode(encode(1.0, [messages.AllBlocksCleared()]))) == 3


PLACE = os.environ.get("VENV_VLLM")
PROGRAM = """
import json, sys
import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

for line in sys.stdin:
    batch = msgspec.msgpack.decode(bytes.fromhex(line), type=KVEventBatch)
    events = [[type(one).__name__, msgspec.structs.asdict(one)] for one in batch.events]
    print(json.dumps([batch.ts, batch.data_parallel_rank, events]))
stored = BlockStored(
    [1, 2], None, [5, 6], 1, None, "GPU", None, group_idx=1, kv_cache_spec_kind="mamba", session_id="a"
)
events = [AllBlocksCleared(), stored, BlockRemoved([1], "GPU", group_idx=1)]
print(msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=events, data_parallel_rank=0)).hex())
"""


@pytest.mark.peers
@pytest.mark.skipif(not PLACE, reason="VENV_VLLM names no environment with vLLM")
def test_vllm_decodes_published_events_and_its_own_are_read() -> None:
    sent = payloads()
    command = [str(Path(PLACE) / "bin" / "python"), "-c", PROGRAM]
    lines = "\n".join(payload.hex() for payload in sent)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *decoded, theirs = done.stdout.splitlines()[-len(sent) - 1 :]
    seen = set()
    for payload, line in zip(sent, decoded, strict=True):
        ts, rank, events = json.loads(line)
        assert (ts, rank) == (1.5, 0)
        for (name, fields), ours in zip(events, decode(payload), strict=True):
            seen.add(name)
            assert name == type(ours).__name__
            assert {key: getattr(ours, key, None) for key in fields} == fields
    assert seen == {"AllBlocksCleared", "BlockStored", "BlockRemoved"}
    cleared, stored, removed = decode(bytes.fromhex(theirs))
    assert (stored.block_hashes, stored.group_idx, stored.kv_cache_spec_kind) == ([1, 2], 1, "mamba")
    assert (type(cleared).__name__, removed.block_hashes, removed.group_idx) == ("AllBlocksCleared", [1], 1)
    assert isinstance(stored, BlockStored)
