"""A hit changes no bit, from any store, stored by any server, and with any part of it lost meanwhile."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headwater.account import TierOutcome
from headwater.tiers.disk import DiskStore
from headwater.tiers.memory import MemoryStore
from headwater.tiers.redis import RedisStore
from headwater.tiers.store import Store
from tests.exactness.rig import Answer, words
from tests.exactness.test_tiers import PROMPT, copied, disk, files_of, server, stored_prompt
from tests.redis_server import redis_server

DEEPEST = (PROMPT - 1) // 64 * 64
Stores = Callable[[], list[Store]]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Callable[[], RedisStore]]:
    with redis_server(tmp_path) as running:
        yield lambda: RedisStore(running.url, None)


def test_memory_and_redis_give_the_same_bits(make, same_bits_as_without_a_cache, redis) -> None:
    in_memory = MemoryStore(None)
    for stores in (lambda: [in_memory], lambda: [redis()]):
        with server(make, stores()) as rig:
            first = rig.ask(words(PROMPT, "place"))
        with server(make, stores()) as rig:
            again = rig.ask(first.prompt)
            turn = rig.ask([*first.everything, *words(40, "turn")])
        assert again.account.loaded_tokens == again.account.cached_tokens == PROMPT
        assert all(same_bits_as_without_a_cache(make, [first, again, turn]))


def test_parts_missing_in_the_first_tier_come_from_the_second(
    make, same_bits_as_without_a_cache, redis, tmp_path
) -> None:
    """Each part on disk is dropped in turn, then all are."""
    with server(make, [DiskStore(tmp_path / "tier", None), redis()]) as rig:
        first = rig.ask(words(PROMPT, "both"))
    tail = min(files_of(tmp_path / "tier", "t"), key=lambda file: file.stat().st_size)  # the answer's is longer, if any
    files = [*(file for kind in "sk" for file in files_of(tmp_path / "tier", kind)), tail]
    assert len(files) == 4
    several = [(files[at : at + 1], "disk,redis") for at in (0, 1, 3)]  # the state, a run of KV, the tail
    for lost, loaded_from in (*several, (files, "redis")):
        contents = [file.read_bytes() for file in lost]
        for file in lost:
            file.unlink()
        with server(make, [DiskStore(tmp_path / "tier", None), redis()]) as rig:
            again = rig.ask(first.prompt)
        assert (again.account.loaded_tokens, again.account.loaded_from) == (PROMPT, loaded_from)
        assert same_bits_as_without_a_cache(make, [again]) == [True]
        for file, content in zip(lost, contents, strict=True):
            file.write_bytes(content)


class Gone(MemoryStore):
    """A store that loses a part of a kind while others of the same load are read."""

    def __init__(self) -> None:
        super().__init__(None)
        self.loses = ""
        self.filled = threading.Event()  # another part was read into its pages

    def read_into(self, name: str, pieces) -> bool:
        if self.loses and name.startswith(self.loses):
            assert self.filled.wait(30)
            self.delete([name])
        found = super().read_into(name, pieces)
        self.filled.set()
        return found


@pytest.mark.parametrize("kind", ["s", "k"])
def test_a_load_whose_part_is_evicted_meanwhile_is_computed(make, same_bits_as_without_a_cache, kind) -> None:
    """Half of its pages are filled by then: they are given back, and the request computes into others."""
    store = Gone()
    with server(make, [store]) as rig:
        first = rig.ask(words(PROMPT, "half"))
    store.loses = kind
    if kind == "k":
        *_, store.loses = (name for name in store._content if name.startswith("k"))  # the second run
    with ExitStack() as stack:
        rig = stack.enter_context(server(make, [store]))
        answers = [rig.submit(first.prompt, 8), rig.submit([*first.prompt, *words(30, "more")], 8)]
        beside = rig.submit(words(300, "beside"), 8)
        answers = [rig.wait(answer) for answer in (*answers, beside)]
        assert rig.engine.scheduler.tiers.tiers[0].counts["read"] >= 1, "a part was read before"
        assert rig.engine.scheduler.tiers.tiers[0].counts["gone"] == 1
    assert answers[0].account.tier_outcome == TierOutcome.FAILED
    assert answers[0].account.cached_tokens == 0
    assert all(same_bits_as_without_a_cache(make, answers))


def loaded_while_memory_evicts(make, stores: list[Store], prompts: list[list[int]]) -> list[Answer]:
    with server(make, stores, pages=30) as rig:
        answers = []
        for i, prompt in enumerate(3 * prompts):
            beside = rig.submit(words(200, "beside", i), 4)
            answers += [rig.ask(prompt, 4), rig.wait(beside)]
        assert rig.engine.scheduler.cache.stats().evicted_checkpoints > 0
        assert rig.engine.scheduler.tiers.loaded_tokens > 3 * DEEPEST
    return answers


def test_loads_are_exact_while_memory_evicts(make, same_bits_as_without_a_cache, tmp_path) -> None:
    """Loaded prefixes are evicted, and loaded again, several times over, while another request computes."""
    prompts = [words(PROMPT, "evicted", i) for i in range(3)]
    with server(make, disk(tmp_path)) as rig:
        for prompt in prompts:
            rig.ask(prompt, 1)
    assert all(same_bits_as_without_a_cache(make, loaded_while_memory_evicts(make, disk(tmp_path), prompts)))


def test_servers_with_unlike_placements_share_a_folder(make, same_bits_as_without_a_cache, tmp_path) -> None:
    """Both run at once; each resumes from states at positions that only the other one's placement chooses."""
    prompts = {name: words(PROMPT + 70, name) for name in ("every_block(4)", "branch")}
    with ExitStack() as stack:
        rigs = {name: stack.enter_context(server(make, disk(tmp_path), placement=name)) for name in prompts}
        answers = [rigs[name].ask(prompt) for name, prompt in prompts.items()]
        for rig in rigs.values():
            copied(rig)
        cut = 5 * 64 * 3 + 7  # its deepest checkpoint below is one of every_block(4)
        sparse = rigs["branch"].ask([*prompts["every_block(4)"][:cut], *words(40, "own")])
        dense = rigs["every_block(4)"].ask([*prompts["branch"], *words(40, "own")])
    assert sparse.account.loaded_tokens == cut // 256 * 256
    assert dense.account.loaded_tokens == DEEPEST + 64, "a position that only branch has"
    assert all(same_bits_as_without_a_cache(make, [*answers, sparse, dense]))


@pytest.mark.parametrize("kind", ["s", "k"])
def test_parts_that_are_cut_or_longer_are_computed(make, same_bits_as_without_a_cache, tmp_path, kind) -> None:
    first = stored_prompt(make, tmp_path)
    whole = {file: file.read_bytes() for file in files_of(tmp_path, kind)}
    for change in (
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content[:40],
        lambda content: b"",
        lambda content: content + b"\0",
        lambda content: content[:100] + content[101:] + b"\0",
    ):
        for file, content in whole.items():
            file.write_bytes(change(content))
        with server(make, disk(tmp_path)) as rig:
            again = rig.ask(first.prompt)
        assert again.account.tier_outcome == TierOutcome.CORRUPT
        assert again.account.cached_tokens == 0
        assert same_bits_as_without_a_cache(make, [again]) == [True]


def test_damage_in_redis_is_found(make, same_bits_as_without_a_cache, redis) -> None:
    """Manifests with other figures, exchanged manifests, and pieces with a flipped or a missing byte."""
    prompts = [words(PROMPT, "redis", i) for i in range(2)]
    with server(make, [redis()]) as rig:
        answers = [rig.ask(prompt) for prompt in prompts]
    client = redis().client
    states = sorted(client.keys("headwater:part:s*"))
    assert len(states) == 2
    kept = {key: client.dump(key) for key in client.keys("headwater:*")}

    def other_figures(upload: bytes, pieces: bytes, size: bytes) -> list[bytes]:
        less, many = str(int(size) - 1).encode(), b" 900000000000 900000000000000000"
        return [b"", b"\xff", b"x " + pieces + b" " + size, upload + b" 0 0", upload + b" 1 " + less, upload + many]

    def set_both(values: list[bytes]) -> None:
        for key, value in zip(states, values, strict=True):
            client.set(key, value)

    def change_pieces(change: Callable[[bytes], bytes]) -> None:
        for key in states:
            piece = b"headwater:piece:" + client.get(key).split()[0] + b":0"
            client.set(piece, change(client.get(piece)))

    manifests = [client.get(key) for key in states]
    by_figure = zip(*(other_figures(*manifest.split()) for manifest in manifests), strict=True)
    damages: list[Callable[[], None]] = [lambda values=list(values): set_both(values) for values in by_figure]
    damages.append(lambda: set_both(manifests[::-1]))
    for at in (0, 60, 5000, -1):
        damages.append(lambda at=at: change_pieces(lambda piece: _flipped(piece, at)))
    damages.append(lambda: change_pieces(lambda piece: piece[:-1]))
    for damage in damages:
        damage()
        with server(make, [redis()]) as rig:
            again = [rig.ask(prompt) for prompt in prompts]
            copied(rig)
        assert [answer.account.cached_tokens for answer in again] == [0, 0]
        assert all(same_bits_as_without_a_cache(make, again))
        client.flushdb()
        for key, value in kept.items():
            client.restore(key, 0, value)
    with server(make, [redis()]) as rig:
        assert rig.ask(prompts[0]).account.loaded_tokens == PROMPT, "without damage"
    assert all(same_bits_as_without_a_cache(make, answers))


def _flipped(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 0x40
    return bytes(changed)
