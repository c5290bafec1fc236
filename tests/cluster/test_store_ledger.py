"""Contents of stores as events: what a reader knows of them, in any order of changes, and after a snapshot."""

import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.cache.segments.compose import Widths
from headwater.cache.segments.store import SegmentKey
from headwater.cluster.cost import Found, Stored
from headwater.cluster.messages import KV, SEGMENTS, STATES, BlockRemoved, BlockStored, Digests
from headwater.cluster.picture import Picture
from headwater.cluster.store_ledger import StoreLedger, StoreWatch
from headwater.plan import CacheLayout
from headwater.tiers.changes import AllForgotten, PartsRemoved, PrefixStored, SegmentsStored, StoreChanges, StoreLog
from headwater.tiers.disk import DiskStore
from headwater.tiers.memory import MemoryStore
from headwater.tiers.names import Names, run_name, runs_of, state_name
from headwater.tiers.part import HEADER, Part, Sealer
from headwater.tiers.store import OwnStore
from tests.cluster.rig import KEY, begun, logged, stream_of

MEDIUM, RUN_UNITS = "STORAGE", 4
LAYOUT = logged().layout
UNIT = LAYOUT.unit_bytes
DIGESTS, NAMES = Digests(KEY, UNIT), Names(KEY, "own", UNIT)
OTHERS = Names(KEY, "other", UNIT)


def key(units: int, seed: int = 0, after: bytes = b"") -> bytes:
    return after + random.Random(seed).randbytes(UNIT * units - len(after))


def parts(of: bytes, names: Names = NAMES, namespace: str = "") -> list[str]:
    """Return the names of a prefix's runs, and of the state at its end."""
    digests, end = names.digests(namespace, of), len(of) // UNIT
    return [*(run_name(digests, *run) for run in runs_of(end, RUN_UNITS)), state_name(digests, end)]


def stored(of: bytes, namespace: str = "") -> PrefixStored:
    return PrefixStored(namespace, of, parts(of, namespace=namespace))


def of_prefixes(*keys: bytes) -> dict[int, set[int]]:
    """Return the digests of all blocks and of all states of these prefixes, by group."""
    digests = [DIGESTS.prefix("", one) for one in keys]
    return {KV: {digest for one in digests for digest in one}, STATES: {one[-1] for one in digests}}


def known(picture: Picture) -> dict[int, set[int]]:
    held = picture.stored.get(MEDIUM, defaultdict(set))
    return {group: set(held[group]) for group in (KV, STATES)}


class Reader:
    """A picture that follows a ledger's changes."""

    def __init__(self) -> None:
        self.ledger, toy = StoreLedger(MEDIUM, DIGESTS, LAYOUT.unit_tokens), logged()
        self.stream = stream_of(toy, stores=[self.ledger])
        self.picture = Picture()
        self.picture.apply(begun(toy, self.stream))

    def take(self, *changes) -> bool:
        message = self.stream.stored(self.ledger, changes)
        return message is not None and self.picture.apply(message)


def test_blocks_of_overlapping_runs_stay_until_the_last_run_is_removed() -> None:
    reader, long = Reader(), key(7)
    short = long[: 5 * UNIT]  # its second run has the first unit of the longer one's
    reader.take(stored(short), stored(long))
    assert known(reader.picture) == of_prefixes(short, long)
    first, _, state = parts(long)
    reader.take(PartsRemoved([parts(long)[1], state]))
    assert known(reader.picture) == of_prefixes(short)
    reader.take(PartsRemoved([parts(short)[1], "unknown"]))
    digests = DIGESTS.prefix("", short)
    assert known(reader.picture) == {KV: set(digests[:4]), STATES: {digests[4]}}
    reader.take(PartsRemoved([first, parts(short)[2]]))
    assert known(reader.picture) == {KV: set(), STATES: set()}


def test_reader_holds_the_store_after_random_changes_and_snapshots() -> None:
    draw, reader, there = random.Random(3), Reader(), set[str]()
    roots = [key(8, seed) for seed in range(3)]
    prefixes = [key(n, 10 + n, root[: UNIT * n // 2]) for root in roots for n in range(2, 12)]
    for _ in range(300):
        one = draw.choice(prefixes)
        if draw.random() < 0.6:
            reader.take(stored(one))
            there.update(parts(one))
        else:
            gone = draw.sample(parts(one), 1)
            reader.take(PartsRemoved(gone))
            there.difference_update(gone)
        wanted: dict[int, set[int]] = {KV: set(), STATES: set()}
        for prefix in prefixes:
            digests = DIGESTS.prefix("", prefix)
            *runs, state = parts(prefix)
            for run, (start, end) in zip(runs, runs_of(len(digests), RUN_UNITS), strict=True):
                wanted[KV].update(digests[start:end] if run in there else ())
            wanted[STATES].update(digests[-1:] if state in there else ())
        assert known(reader.picture) == wanted
    again = Picture()
    assert again.load(reader.stream.snapshot())
    assert known(again) == known(reader.picture)
    reader.take(AllForgotten())
    assert known(reader.picture) == {KV: set(), STATES: set()}


def test_a_prefix_that_is_stored_again_sends_nothing() -> None:
    reader, one = Reader(), key(3)
    assert reader.take(stored(one))
    assert not reader.take(stored(one))


def test_all_that_is_held_is_sent_again_with_the_cache() -> None:
    """After a full queue readers get everything in one message, and that begins with the removal of all blocks."""
    reader, one = Reader(), key(6)
    reader.take(stored(one))
    assert reader.picture.apply(reader.stream.begin([]))
    assert known(reader.picture) == of_prefixes(one)


def test_events_have_a_place_and_a_parent() -> None:
    ledger = StoreLedger(MEDIUM, DIGESTS, LAYOUT.unit_tokens)
    digests = DIGESTS.prefix("a", key(6))
    first, second, state = ledger.events([stored(key(6), "a")])
    assert all(isinstance(one, BlockStored) and one.medium == MEDIUM for one in (first, second, state))
    assert [one.block_hashes for one in (first, second, state)] == [digests[:4], digests[4:], digests[5:]]
    assert [one.parent_block_hash for one in (first, second, state)] == [None, digests[3], digests[4]]
    assert [one.position // LAYOUT.unit_tokens for one in (first, second, state)] == [4, 6, 6]
    assert [one.group_idx for one in (first, second, state)] == [KV, KV, STATES]


def segment(seed: int, namespace: str = "", tokens: int = 40) -> SegmentKey:
    return SegmentKey(namespace, random.Random(seed).randbytes(4 * tokens), Widths(8, 8))


def test_segments_are_blocks_of_their_own_group_as_in_memory() -> None:
    reader, keys = Reader(), [segment(1), segment(2, "salt", 60)]
    names, digests = [NAMES.segment(key.encoded) for key in keys], [DIGESTS.segment(key.as_change) for key in keys]
    events = StoreLedger(MEDIUM, DIGESTS, LAYOUT.unit_tokens).events([SegmentsStored(names, keys)])
    in_memory = reader.stream._ledger.events([replace(key.as_change, page=page) for page, key in enumerate(keys)])
    for event, wanted in zip(events, in_memory, strict=True):
        wanted.medium = MEDIUM
        assert event == wanted
    reader.take(stored(key(3)), SegmentsStored(names, keys))
    assert [reader.picture.stores_of(digest) for digest in digests] == [[MEDIUM], [MEDIUM]]
    assert not any(map(reader.picture.has_segment, digests)), "memory has none"
    assert not reader.take(SegmentsStored(names, keys)), "they are known"
    again = Picture()
    assert again.load(reader.stream.snapshot())
    assert again.stored[MEDIUM][SEGMENTS] == set(digests)
    reader.take(PartsRemoved([names[0], *parts(key(3))]))
    assert [reader.picture.stores_of(digest) for digest in digests] == [[], [MEDIUM]]
    assert [one for one in reader.ledger.events([AllForgotten()])] == [BlockRemoved(digests[1:], MEDIUM, SEGMENTS)]


# -- what a prompt finds


def picture(memory: int, states: tuple[int, ...], kv: int, stored_states: tuple[int, ...]) -> Picture:
    """Return a picture of a worker that has blocks 0, 1, … of a prompt in memory and in its store."""
    found = Reader().picture
    found.held[KV], found.held[STATES] = set(range(memory)), set(states)
    found.stored[MEDIUM] = defaultdict(set, {KV: set(range(kv)), STATES: set(stored_states)})
    return found


@pytest.mark.parametrize(
    ("memory", "states", "kv", "stored_states", "deepest"),
    [
        (0, (), 8, (7,), 8),  # all of it is in the store
        (4, (3,), 8, (7,), 8),
        (6, (), 4, (5,), 6),  # KV is in memory, a state in the store
        (4, (3,), 8, (3,), 0),  # memory has as much
        (4, (3,), 8, (), 0),  # no state
        (4, (3,), 5, (7,), 0),  # KV below the state is missing
        (4, (3,), 7, (7, 6), 7),
        (2, (), 20, (19,), 0),  # the last token is computed
    ],
)
def test_a_load_needs_a_state_and_all_kv_before_it(
    memory: int, states: tuple[int, ...], kv: int, stored_states: tuple[int, ...], deepest: int
) -> None:
    size, blocks = LAYOUT.unit_tokens, range(10)
    one = picture(memory, states, kv, stored_states)
    found = one.find(blocks, 10 * size)
    wanted = (Stored(MEDIUM, deepest * size),) if deepest else ()
    assert one.find_stored(blocks, 10 * size, found) == wanted
    assert found == Found(memory * size, len(states) * 4 * size), "a store changes nothing of what memory has"


# -- whose store it is


class OwnTier:
    """Tier over a store."""

    names = NAMES

    def __init__(self, store: OwnStore) -> None:
        self.own_store = store

    def publish(self, changes: StoreChanges) -> None:
        self.own_store.changes = changes
        self.own_store.claim()


def put(store: OwnStore, of: bytes, names: Names = NAMES, namespace: str = "", has_kv: bool = True) -> None:
    """Store a prefix, as an engine does it."""
    digests, end, sealer = names.digests(namespace, of), len(of) // UNIT, Sealer(KEY)
    for start, stop in runs_of(end, RUN_UNITS) if has_kv else ():
        part = Part("k", start, stop, of[: stop * UNIT], [b"kv" * 50], below=digests[start])
        store.put(run_name(digests, start, stop), sealer.seal(run_name(digests, start, stop), part))
    state = Part("s", 0, end, of, [b"state" * 50], 1.0)
    store.put(state_name(digests, end), sealer.seal(state_name(digests, end), state))


def watched(store: OwnStore, layout: CacheLayout = LAYOUT) -> tuple[StoreWatch, Reader]:
    """Return a watch over a store that has looked once, and a reader of its log."""
    watch, reader = StoreWatch(OwnTier(store), DIGESTS, layout), Reader()
    watch._tier.publish(watch.log)
    watch.look()
    reader.take(*watch.log.take())
    return watch, reader


def test_parts_of_an_earlier_server_in_the_folder_are_published(tmp_path: Path) -> None:
    """Without parts of another fingerprint, or of a namespace, which no part names."""
    one, store = key(9), DiskStore(tmp_path, None)
    branch = key(7, 1, one[: 4 * UNIT])
    for of in (one, one[: 6 * UNIT], branch):
        put(store, of)
    put(store, key(5, 2), OTHERS)
    put(store, key(5, 3), namespace="salt")
    store.close()
    _, reader = watched(DiskStore(tmp_path, None))
    assert known(reader.picture) == of_prefixes(one, one[: 6 * UNIT], branch)


def test_states_of_a_model_without_attention_are_found(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, None)
    put(store, key(5), has_kv=False)
    put(store, key(5, 3), namespace="salt", has_kv=False)
    _, reader = watched(store, replace(LAYOUT, kv_pages_per_unit=0))
    assert known(reader.picture) == {KV: set(), STATES: {DIGESTS.prefix("", key(5))[-1]}}


@pytest.mark.parametrize("kv_pages", [0, 1])
def test_segments_that_an_earlier_server_left_are_found(tmp_path: Path, kv_pages: int) -> None:
    """Also those of a namespace, which is in their keys. Not those of another fingerprint, nor damaged ones."""
    store, sealer, own = DiskStore(tmp_path, None), Sealer(KEY), [segment(1), segment(2, "salt")]
    for one, names in ((own[0], NAMES), (own[1], NAMES), (segment(3), OTHERS)):
        name, encoded = names.segment(one.encoded), one.encoded
        store.put(name, sealer.seal(name, Part("g", 8, 32, encoded, [b"all" * 50], 1.0)))
    damaged = NAMES.segment(segment(4).encoded)
    store.put(damaged, sealer.seal(damaged, Part("g", 8, 32, segment(5).encoded, [b"all" * 50], 1.0)))
    _, reader = watched(store, replace(LAYOUT, kv_pages_per_unit=kv_pages))
    assert reader.picture.stored[MEDIUM][SEGMENTS] == {DIGESTS.segment(one.as_change) for one in own}


@pytest.mark.parametrize("kv_pages", [0, 1])
def test_files_that_are_not_parts_are_ignored(tmp_path: Path, kv_pages: int) -> None:
    store = DiskStore(tmp_path, None)
    put(store, key(5), has_kv=kv_pages > 0)
    (begin,) = NAMES.digests("", b"")
    huge = Part("k", 0, 4, b"", [], below=begin)
    content = bytearray(b"".join(Sealer(KEY).seal("k", huge)))
    content[HEADER.size - 16 : HEADER.size] = b"\xff" * 7 + b"\x7f" * 9  # it says to have an endless key
    for name in ("kx", "kabc", "sx", "gx", f"g{begin}", f"k{begin}-999999999999999", f"s{begin}"):
        (tmp_path / "aa").mkdir(exist_ok=True)
        for folder in (tmp_path / "aa", Path(store._file(name)).parent):
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    _, reader = watched(store, replace(LAYOUT, kv_pages_per_unit=kv_pages))
    assert known(reader.picture)[STATES] == of_prefixes(key(5))[STATES]


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_evicted_and_deleted_parts_are_removed(tmp_path: Path, kind: str) -> None:
    store: OwnStore = DiskStore(tmp_path, 4000) if kind == "disk" else MemoryStore(4000)
    watch, reader = watched(store)
    keys = [key(5, seed) for seed in range(12)]
    for one in keys:
        put(store, one)
        watch.log.put(stored(one))
        reader.take(*watch.log.take())
    there = [one for one in keys if all(store.has(parts(one)))]
    assert 0 < len(there) < 12
    assert known(reader.picture)[STATES] == of_prefixes(*there)[STATES]
    assert known(reader.picture)[KV] >= of_prefixes(*there)[KV]
    store.delete(parts(there[0]))
    reader.take(*watch.log.take())
    assert known(reader.picture)[STATES] == of_prefixes(*there[1:])[STATES]


def test_a_folder_is_published_while_one_server_has_it(tmp_path: Path) -> None:
    one, first = key(6), DiskStore(tmp_path, None)
    put(first, one)
    watch, reader = watched(first)
    assert known(reader.picture) == of_prefixes(one)
    second = DiskStore(tmp_path, None)
    other, unaware = watched(second)
    assert not other.log.is_open
    assert known(unaware.picture) == {KV: set(), STATES: set()}
    watch.look()
    reader.take(*watch.log.take())
    assert known(reader.picture) == {KV: set(), STATES: set()}
    put(second, key(4, 5))
    second.close()
    watch.look()
    reader.take(*watch.log.take())
    assert known(reader.picture) == of_prefixes(one, key(4, 5)), "what the other one left there, too"


def test_a_closed_log_takes_nothing() -> None:
    log = StoreLog()
    log.put(PartsRemoved(["a"]))
    assert not log.take()
    log.open()
    log.put(PartsRemoved(["a"]))
    log.close()
    assert log.take() == [PartsRemoved(["a"]), AllForgotten()]
