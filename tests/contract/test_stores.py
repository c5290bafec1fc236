"""Contract of the stores of tiers."""

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.tiers.names import (
    ENTRIES,
    RUN,
    SEGMENT,
    STATE,
    TAIL,
    Names,
    entries_name,
    fingerprint_name,
    is_name,
    read_key,
    run_name,
    runs_of,
    state_name,
    tag_of,
)
from headwater.tiers.part import HEADER, CorruptPart, Part, Sealer
from headwater.tiers.place import TierPlace
from headwater.tiers.store import Store, StoreError, StoreFull
from tests.redis_server import redis_server

KEY = bytes(range(32))
SEALER, NAMES = Sealer(KEY), Names(KEY, "fingerprint", 4)
LIMIT = 200_000
Make = Callable[..., Store]


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture(params=["disk", "memory", "redis"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """(limit) -> a store; all of one test have the same content, but in memory."""
    clock = Clock()
    if request.param == "disk":
        from headwater.tiers.disk import DiskStore

        yield lambda limit=None: DiskStore(tmp_path / "store", limit, clock)
    elif request.param == "memory":
        from headwater.tiers.memory import MemoryStore

        yield lambda limit=None: MemoryStore(limit, clock)
    else:
        with redis_server(tmp_path) as server:
            from headwater.tiers.redis import RedisStore

            yield lambda limit=None: RedisStore(server.url, limit, clock=clock)


def key_of(name: str, units: int) -> bytes:
    rng = random.Random(name)
    return rng.randbytes(4 * units)


def session(key: bytes, ends: tuple[int, ...], length: int = 4, size: int = 2000, seconds: float = 1.0):
    """Yield (name, part) of the states at these ends, each after the runs below it."""
    digests, after = NAMES.digests("", key), 0
    known = set()
    for end in ends:
        for run in runs_of(end, length):
            name = run_name(digests, *run)
            if name not in known:
                known.add(name)
                yield name, Part(RUN, *run, key[: 4 * run[1]], [b"k" * size * (run[1] - run[0])], 0.0, digests[run[0]])
        yield state_name(digests, end), Part(STATE, after, end, key[: 4 * end], [b"s" * size], seconds)
        after = end


def put(store: Store, parts) -> list[str]:
    parts = list(parts)
    names = [name for name, _ in parts]
    for name, part in parts:
        store.put(name, SEALER.seal(name, part), frozenset(names))
    return names


def test_stored_parts_are_read_back(make: Make) -> None:
    store = make()
    content = [b"header", memoryview(random.Random(1).randbytes(3_000_000)), b"", b"end"]
    assert store.has(["sabc", "sdef"]) == [False, False]
    assert store.get("sabc") is None
    store.put("sabc", content)
    assert store.has(["sdef", "sabc"]) == [False, True]
    assert bytes(store.get("sabc")) == b"".join(content)
    assert store.usage().parts == 1
    assert store.usage().bytes == 3_000_009
    store.put("sabc", [b"other"])
    assert len(store.get("sabc")) == 3_000_009, "what is there stays"
    store.delete(["sabc", "sdef"])
    assert store.get("sabc") is None
    assert (store.usage().parts, store.usage().bytes) == (0, 0)
    store.close()


def test_part_that_does_not_fit_is_refused_and_others_stay(make: Make) -> None:
    store = make(LIMIT)
    names = put(store, session(key_of("a", 4), (4,)))
    with pytest.raises(StoreFull):
        store.put("sabc", [bytes(LIMIT + 1)])
    assert store.has(names) == [True] * len(names)


def test_no_byte_is_kept_that_no_state_needs(make: Make) -> None:
    """The parts of many sessions are stored beyond the limit: each state that is left has all its runs, each run is
    below a state, but for those of the session that is being stored."""
    store = make(LIMIT)
    sessions = {}
    for number in range(30):
        key = key_of("shared", 4) + key_of(str(number), 12)
        parts = list(session(key, (4, 10, 16), seconds=1.0 + number % 3))
        sessions[number] = key
        put(store, parts)
        left = set(store.catalog().entries)
        needed = set()
        for earlier in sessions.values():
            digests = NAMES.digests("", earlier)
            for end in (4, 10, 16):
                if state_name(digests, end) in left:
                    runs = {run_name(digests, *run) for run in runs_of(end, 4)}
                    assert runs <= left
                    needed |= runs
        assert {name for name in left if name.startswith(RUN)} <= needed | {name for name, _ in parts}
        assert store.usage().bytes <= LIMIT
    assert store.usage().evicted > 0
    assert state_name(NAMES.digests("", key_of("shared", 4)), 4) in left, "what all stand on"


def test_entries_go_with_their_runs(make: Make) -> None:
    store = make(LIMIT)
    for number in range(20):
        key, parts = key_of(str(number), 12), list(session(key_of(str(number), 12), (4, 10, 12)))
        beside = [
            (entries_name(name), Part(ENTRIES, part.start, part.end, part.key, [b"m" * 700]))
            for name, part in parts
            if part.kind == RUN
        ]
        put(store, [*parts[:1], *beside[:1], *parts[1:], *beside[1:]])
        left = set(store.catalog().entries)
        runs = {name[1:] for name in left if name.startswith(RUN)}
        assert {name[1:] for name in left if name.startswith(ENTRIES)} == runs
        assert store.usage().bytes <= LIMIT
    assert store.usage().evicted > 0
    assert store.catalog().stranded() == []
    run = run_name(NAMES.digests("", key), 0, 4)
    store.delete([run])
    assert entries_name(run) in store.catalog().stranded()


def test_tail_is_evicted_before_its_state_or_with_it(make: Make) -> None:
    store, tails = make(LIMIT), {}
    for number in range(20):
        key = key_of(str(number), 12)
        *_, state = parts = list(session(key, (4, 12)))
        digest = NAMES.digests("", key)[12]
        name, ids = NAMES.tail(digest, b"ids", True), key + b"ids"
        tails[name] = state[0]
        tail = Part(TAIL, 48, 50, ids, [b"t" * 900], 2.0 * (number % 2), digest)
        put(store, [*parts, (name, tail), (entries_name(name), Part(ENTRIES, 48, 50, ids, [b"m" * 100]))])
        left = set(store.catalog().entries)
        assert {tails[name] for name in tails.keys() & left} <= left
        assert {name[1:] for name in left if name.startswith(ENTRIES)} == {name[1:] for name in tails.keys() & left}
    assert store.usage().evicted > 0
    assert store.catalog().stranded() == []
    store.delete([state[0]])
    assert {name, entries_name(name)} <= set(store.catalog().stranded())


def test_fingerprint_without_parts_is_removed(make: Make) -> None:
    store = make()
    fingerprint = fingerprint_name(NAMES.tag)
    store.put(fingerprint, [b"fingerprint"])
    assert store.catalog().stranded() == [fingerprint]
    put(store, session(key_of("a", 12), (4, 10)))
    assert store.catalog().stranded() == []
    states = [name for name in store.catalog().entries if name.startswith(STATE)]
    store.delete(states)
    stranded = store.catalog().stranded()
    assert fingerprint not in stranded
    store.delete(stranded)
    assert store.catalog().stranded() == [fingerprint]
    assert next(store.catalog().victims(now=0.0)) == [], "it may be that of a server that begins to store"
    assert next(store.catalog().victims(now=2e9)) == [fingerprint]


def test_states_are_counted_by_the_tags_of_their_fingerprints(make: Make) -> None:
    store = make(LIMIT)
    other = state_name(Names(KEY, "other", 4).digests("", key_of("other", 4)), 4)
    names = [other]
    store.put(other, SEALER.seal(other, Part(STATE, 0, 4, key_of("other", 4), [b"state"], 1e9)))
    assert tag_of(other) != NAMES.tag
    for number in range(20):
        names += put(store, session(key_of(str(number), 8), (4, 8)))
        left = [name for name in store.catalog().entries if name.startswith(STATE)]
        counted = {tag: count for tag, count in store.usage().states.items() if count}
        assert counted == Counter(map(tag_of, left))
    assert store.usage().evicted > 0
    store.delete(names)
    assert not any(store.usage().states.values())


def test_state_that_saves_least_is_evicted_first(make: Make) -> None:
    store = make(LIMIT)
    dear, cheap = (state_name(NAMES.digests("", key_of(name, 8)), 8) for name in ("dear", "cheap"))
    put(store, session(key_of("dear", 8), (8,), seconds=50.0))
    put(store, session(key_of("cheap", 8), (8,), seconds=1.0))
    for number in range(12):
        put(store, session(key_of(f"other {number}", 8), (8,), seconds=5.0))
    assert store.has([dear, cheap]) == [True, False]


def test_segment_and_state_that_save_least_are_evicted_first(make: Make) -> None:
    store = make(LIMIT)

    def segment(name: str, seconds: float) -> tuple[str, Part]:
        key = key_of(name, 300)
        return NAMES.segment(key), Part(SEGMENT, 8, 292, key, [b"g" * 20_000], seconds)

    dear, cheap = segment("dear", 50.0), segment("cheap", 0.01)
    put(store, [dear, cheap])
    state = put(store, session(key_of("state", 8), (8,), seconds=50.0))
    for number in range(12):
        put(store, [segment(f"other {number}", 5.0)])
    assert store.has([dear[0], cheap[0]]) == [True, False]
    assert store.has(state) == [True] * len(state), "segments are evicted for segments"
    assert store.usage().evicted > 0
    assert not store.catalog().stranded()
    assert SEALER.unseal(dear[0], store.get(dear[0])).key == dear[1].key
    for number in range(12):
        put(store, session(key_of(f"session {number}", 8), (8,), seconds=500.0))
    assert not store.has([dear[0]])[0], "and for states"


def test_several_threads_may_use_it(make: Make) -> None:
    store = make(LIMIT)
    errors = []

    def work(number: int) -> None:
        try:
            for i in range(10):
                names = put(store, session(key_of(f"{number % 2} {i}", 8), (8,)))
                for name in names:
                    content = store.get(name)
                    if content is not None:
                        SEALER.unseal(name, content)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [error for error in errors if not isinstance(error, StoreFull)] == []


def test_clock_set_back_changes_no_part_order(make: Make) -> None:
    """Parts were used in the future of that clock: the store keeps to its limit, whole sets and what saves most."""
    store = make(LIMIT)
    dear = put(store, session(key_of("dear", 8), (8,), seconds=1e6))
    for back in (0.0, 1e8, 5e8):
        store._clock.now -= back
        for number in range(12):
            names = put(store, session(key_of(f"{back} {number}", 8), (8,)))
            assert store.has(names) == [True] * len(names)
            assert store.usage().bytes <= LIMIT
            for name in names:
                SEALER.unseal(name, store.get(name))
        assert store.catalog().stranded() == []
    assert store.usage().evicted > 0
    assert store.has(dear) == [True] * len(dear)


def test_one_of_two_writers_of_a_name_wins_whole(make: Make) -> None:
    """Concurrent readers see nothing, or all that one of them wrote."""
    one, other = make(), make()
    stores, wrong = (one, one) if one.kind == "memory" else (one, other), []
    for number in range(20):
        name, contents = f"s{number:02}", [bytes([writer + 1]) * 300_000 for writer in range(2)]
        gate = threading.Barrier(3)

        def write(store: Store, content: bytes, name: str = name, gate: threading.Barrier = gate) -> None:
            gate.wait()
            store.put(name, [content])

        threads = [threading.Thread(target=write, args=pair) for pair in zip(stores, contents, strict=True)]
        for thread in threads:
            thread.start()
        gate.wait()
        while any(thread.is_alive() for thread in threads):
            seen = one.get(name)
            if seen is not None and bytes(seen) not in contents:
                wrong.append(name)
        for thread in threads:
            thread.join()
        assert bytes(one.get(name)) in contents
    assert not wrong
    assert (one.catalog().bytes, len(one.catalog().entries)) == (20 * 300_000, 20)


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_opened_and_read(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater.tiers.disk import UNFINISHED_SUFFIX, DiskStore

    names = put(DiskStore(tmp_path, None), session(key_of("read only", 8), (8,)))
    (tmp_path / ".lock").unlink()
    for folder in (path for path in tmp_path.iterdir() if path.is_dir()):
        (folder / f"{UNFINISHED_SUFFIX}old").touch()
        os.utime(folder / f"{UNFINISHED_SUFFIX}old", (0, 0))
    opens = os.open

    def refuses(path: object, flags: int, *mode: int, **more: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(error, os.strerror(error))
        return opens(path, flags, *mode, **more)  # type: ignore[arg-type]

    def keeps(path: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "open", refuses)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    monkeypatch.setattr(os, "unlink", keeps)
    store = DiskStore(tmp_path, LIMIT)
    assert store.usage().parts == len(names)
    assert all(SEALER.unseal(name, store.get(name)).bytes for name in names)
    with pytest.raises(StoreError, match="cannot be written"):
        put(store, session(key_of("other", 8), (8,)))
    store.close()


def test_a_folder_with_the_lock_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headwater.tiers.disk import DiskStore

    DiskStore(tmp_path, None).close()
    opens = os.open

    def refuses(path: object, *given: int, **more: object) -> int:
        if path == tmp_path / ".lock":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opens(path, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(StoreError, match=r"servers of two users cannot share a folder: .*\.lock"):
        DiskStore(tmp_path, None)


def test_files_of_no_bytes_are_evicted_as_others_are(tmp_path: Path) -> None:
    """A loss of power may leave them."""
    from headwater.tiers.disk import DiskStore

    names = put(DiskStore(tmp_path, None), session(key_of("torn", 8), (8,)))
    for name in names:
        (tmp_path / name[1:3] / name).write_bytes(b"")
    store = DiskStore(tmp_path, LIMIT)
    for number in range(12):
        put(store, session(key_of(f"other {number}", 8), (8,)))
    assert store.usage().evicted > 0
    assert not any(store.has(names[-1:])), "the state of no bytes"


def test_a_key_in_a_folder_that_cannot_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = read_key(tmp_path / "key")

    def refuses(*given: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("headwater.tiers.names._write_key", refuses)
    assert read_key(tmp_path / "key") == key


def test_servers_that_share_a_folder_keep_to_its_limit(tmp_path: Path) -> None:
    from headwater.tiers.disk import DiskStore

    stores = [DiskStore(tmp_path, LIMIT) for _ in range(2)]
    for number in range(20):
        put(stores[number % 2], session(key_of(f"shared {number}", 8), (8,)))
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size <= 1.15 * LIMIT, "what the other wrote since the folder was listed may come on top"


def test_touched_part_is_evicted_last(make: Make) -> None:
    store = make(LIMIT)
    state = state_name(NAMES.digests("", key_of("touched", 8)), 8)
    put(store, session(key_of("touched", 8), (8,)))
    for number in range(20):
        store.touch([state, "snone"])
        put(store, session(key_of(f"other {number}", 8), (8,)))
    assert store.has([state, "snone"]) == [True, False]
    assert store.usage().evicted > 0


def test_every_flipped_bit_is_found() -> None:
    name, part = next(iter(session(key_of("a", 4), (4,), size=20)))
    content = b"".join(SEALER.seal(name, part))
    assert SEALER.unseal(name, content).end == part.end
    for at in range(len(content)):
        for bit in (1, 128):
            flipped = bytearray(content)
            flipped[at] ^= bit
            with pytest.raises(CorruptPart):
                SEALER.unseal(name, flipped)
    for shorter in (0, 1, HEADER.size, len(content) - 1):
        with pytest.raises(CorruptPart):
            SEALER.unseal(name, content[:shorter])
    with pytest.raises(CorruptPart):
        SEALER.unseal(name + "0", content)
    with pytest.raises(CorruptPart):
        Sealer(bytes(32)).unseal(name, content)


def test_names_differ_by_key_fingerprint_namespace_and_every_unit_before_their_end() -> None:
    key = key_of("a", 3)
    first = NAMES.digests("n", key)
    others = (
        Names(bytes(32), "fingerprint", 4).digests("n", key),
        Names(KEY, "other", 4).digests("n", key),
        NAMES.digests("m", key),
        NAMES.digests("n", bytes([key[0] ^ 1]) + key[1:]),
    )
    for other in others:
        assert not {*first[1:]} & {*other[1:]}
    assert NAMES.digests("n", key + b"more")[:4] == first
    segments = [names.segment(key) for names in (NAMES, Names(bytes(32), "fingerprint", 4), Names(KEY, "other", 4))]
    assert len({*segments, NAMES.segment(key + b"more"), state_name(first, 3)}) == 5
    tails = [NAMES.tail(first[at], ids, hidden) for at, ids, hidden in product((1, 2), (b"1", b"11"), (False, True))]
    assert len({*tails, NAMES.tail(others[2][1], b"1", False)}) == 9
    assert all(map(is_name, tails))


def test_key_is_made_once_and_readable_only_by_its_user(tmp_path: Path) -> None:
    file = tmp_path / "below" / "tier-key"
    key = read_key(file)
    assert (len(key), read_key(file), file.stat().st_mode & 0o777) == (32, key, 0o600)
    assert [path.name for path in file.parent.iterdir()] == ["tier-key"]
    file.chmod(0o640)
    with pytest.raises(Exception, match="640"):
        read_key(file)
    file.chmod(0o600)
    file.write_text("00\n")
    with pytest.raises(Exception, match="1 bytes, must have 32"):
        read_key(file)


@pytest.mark.parametrize("is_kept", [True, False])
def test_changes_during_a_folder_listing_count(is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing ends after a part was stored or deleted, and does not know of it."""
    from headwater.tiers.disk import DiskStore

    files, listed = DiskStore._files, threading.Event()

    def slow(store: DiskStore) -> Iterator[os.DirEntry[str]]:
        yield from list(files(store))
        listed.set()
        deadline = time.monotonic() + 0.5
        while (tmp_path / "ab" / "sabc").exists() is not is_kept and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.1)

    if not is_kept:
        earlier = DiskStore(tmp_path, None)
        earlier.put("sabc", [b"part"])
        earlier.close()
    monkeypatch.setattr(DiskStore, "_files", slow)
    store = DiskStore(tmp_path, None)
    assert listed.wait(60)
    if is_kept:
        store.put("sabc", [b"part"])
    else:
        store.delete(["sabc"])
    assert (store.usage().parts, store.usage().bytes) == ((1, 4) if is_kept else (0, 0))
    store.close()


@pytest.mark.parametrize("text", ["memory,size=20GB", "memory:,size=20GB"])
def test_a_tier_in_memory_has_a_size_and_no_place(text: str) -> None:
    assert TierPlace.parse(text) == TierPlace("memory", "", 20 * 10**9)
    store = TierPlace.parse(text).open()
    assert (store.kind, store.limit) == ("memory", 20 * 10**9)


@pytest.mark.parametrize(
    "text", ["memory", "memory:", "memory:/x,size=2GB", "disk,size=2GB", "disk:,size=2GB", "redis"]
)
def test_a_tier_without_its_place_or_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tier"):
        TierPlace.parse(text)


@pytest.mark.parametrize("size", ["-1", "0", "x", "", "1e99GB", "9" * 400])
def test_tier_of_no_size_is_refused_as_a_tiers(size: str) -> None:
    with pytest.raises(ConfigError, match=f"^size is '{size}', must be a number and a unit.* of 1 byte or more"):
        TierPlace.parse(f"disk:/x,size={size}")


def test_fifo_in_a_folder_of_parts_delays_no_reader(tmp_path: Path) -> None:
    store = TierPlace.parse(f"disk:{tmp_path}").open()
    store.put("sabc", [b"content"])
    (file,) = [one for one in tmp_path.rglob("*sabc*") if one.is_file()]
    file.unlink()
    os.mkfifo(file)
    assert store.get("sabc") is None
    assert not store.read_into("sabc", [memoryview(bytearray(7))])
    store.close()
    again = TierPlace.parse(f"disk:{tmp_path}").open()
    assert again.usage().bytes == 0
    again.close()
