"""`/cache`: numbers and fingerprints of the cache's content and of requests, of bounded size."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest
from fastapi.testclient import TestClient

from headwater.config import ServeConfig
from headwater.plan import Draft, Saving
from headwater.server.app import create_app
from headwater.server.http.middleware import RequestContext
from headwater.server.observe import overview
from headwater.server.observe.overview import COLUMNS, TreeWatch
from tests.server.fake_engine import byte_tokenizer

SECRET = "zanzibar" * 40


@pytest.fixture
def client(engine):
    return TestClient(create_app(engine, ServeConfig()))


def remember(engine, text, checkpoints=(64, 128), namespace=""):
    """Put a prompt of two pages into the fake's tree."""
    remember_tokens(engine, byte_tokenizer().encode(text[:128]).ids, checkpoints, namespace)


def remember_tokens(engine, tokens, checkpoints=(64, 128), namespace=""):
    """Put the first two pages of a prompt into the fake's tree."""
    key = np.array(tokens[:128], dtype=np.int32).tobytes()
    request = engine.tree.stats().reserves
    draft = Draft(request, namespace, key, 0, 128, 128, Saving(checkpoints))
    engine.tree.commit(engine.tree.reserve(draft))
    engine.tree.release(request)


def complete(client, **body):
    return client.post("/v1/completions", json={"prompt": "x" * 200, "max_tokens": 4, **body})


def test_empty_cache_has_everything_but_contents(client):
    seen = client.get("/cache").json()
    assert seen["tree"] == {
        "tick": 0, "total_nodes": 0, "shown_nodes": 0, "walked_nodes": 0, "nodes": [], "hottest": []
    }  # fmt: skip
    assert seen["since_start"]["hit_rate"] is None
    assert seen["requests"] == []
    assert seen["memory"]["pages"]["total"] == sum(seen["memory"]["pages"][use] for use in seen["memory"]["bytes"])


def test_cache_overview_lists_where_recent_requests_resumed(client):
    complete(client)
    complete(client)
    seen = client.get("/cache").json()
    first, again = seen["requests"]
    assert (first["reason"], first["resumed_at"], first["prompt_tokens"]) == ("cold", 0, 200)
    assert (again["reason"], again["resumed_at"], again["cached_tokens"]) == ("full", 192, 192)
    assert again["output_tokens"] == 4
    assert again["request_id"].startswith("req-")
    assert seen["since_start"]["hit_rate"] == 192 / 400
    assert seen["since_start"]["misses"]["cold"] == 1
    assert seen["since_start"]["full_hits"] == 1


def test_overview_sends_only_entries_newer_than_the_clients(client, engine):
    complete(client)
    seen = client.get("/cache").json()
    last, tick = seen["requests"][-1]["serial"], seen["tree"]["tick"]
    seen = client.get("/cache", params={"request": last, "tick": tick}).json()
    assert seen["requests"] == []
    assert seen["tree"] is None
    complete(client)
    assert [entry["serial"] for entry in client.get("/cache", params={"request": last}).json()["requests"]] == [
        last + 1
    ]


def test_tree_nodes_are_shown_by_size_and_fingerprint(client, engine):
    remember(engine, "a" * 128)
    remember(engine, "a" * 64 + "b" * 64)
    tree = client.get("/cache").json()["tree"]
    root, shared, *leaves = tree["nodes"]
    assert (root["parent"], root["subtree_tokens"]) == (None, 192)
    assert (shared["start"], shared["end"], shared["checkpoint"]) == (0, 64, True)
    assert {leaf["parent"] for leaf in leaves} == {shared["id"]}
    assert len({node["fingerprint"] for node in tree["nodes"]}) == 4


def test_tree_path_ends_where_the_prompt_leaves_the_tree(engine):
    engine.chat_template = "{{ messages[0].content }}"
    client = TestClient(create_app(engine, ServeConfig()))
    remember(engine, "a" * 128)
    remember(engine, "a" * 64 + "b" * 64)
    remember(engine, "a" * 128, namespace="other")
    nodes = client.get("/cache").json()["tree"]["nodes"]
    ids = {(node["parent"], node["end"]): node["id"] for node in nodes}
    root, *_ = (node["id"] for node in nodes if node["parent"] is None)
    shared = ids[root, 64]

    def path(text, **fields):
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return client.post("/cache/path", json=body).json()["nodes"]

    assert path("a" * 64 + "c" * 64) == [root, shared]
    assert len(path("a" * 150)) == 3
    assert path("c" * 150) == [root]
    assert path("a" * 150, cache_salt="unknown") == []
    assert not {root, shared} & set(path("a" * 150, cache_salt="other"))


def test_cache_overview_contains_no_prompt_text(client, engine):
    remember(engine, SECRET, namespace=SECRET)
    complete(client, prompt=SECRET, cache_salt=SECRET, user=SECRET)
    text = client.get("/cache").text
    assert "zanzibar" not in text
    tokens = byte_tokenizer().encode(SECRET[:64]).ids
    assert json.dumps(tokens)[1:30] not in text


def test_failed_and_a_cancelled_request_are_listed(client, engine):
    engine.fail, engine.fail_after = RuntimeError("midway"), 1
    client.post("/v1/completions", json={"prompt": "abc", "stream": True})
    (entry,) = client.get("/cache").json()["requests"]
    assert entry["finish_reason"] == "RuntimeError"
    assert "prompt_tokens" not in entry


def test_cache_overview_counts_waiting_and_finished_healings(client, engine):
    engine.figures = {
        "healings_waiting": 2, "healed": 5, "healings_superseded": 3, "healings_given_up": 1,
        "healing_tokens": 640, "segment_tokens": 512,
    }  # fmt: skip
    seen = client.get("/cache").json()
    assert seen["healings_waiting"] == 2
    assert seen["since_start"]["healings"] == {"healed": 5, "superseded": 3, "given_up": 1}
    computed = seen["since_start"]["computed_tokens"]
    assert (computed["healing"], computed["segment"], computed["prefill"]) == (640, 512, 0)


def test_list_of_last_requests_is_bounded():
    ring = overview.Recent()
    for _ in range(3 * overview.MAX_RECENT_REQUESTS):
        ring.lost(RequestContext(), "chat", None)
    assert len(ring.since(0)) == overview.MAX_RECENT_REQUESTS
    assert ring.since(3 * overview.MAX_RECENT_REQUESTS - 1) == [ring.since(0)[-1]]


def test_timeline_keeps_the_newest_samples_in_order(engine, monkeypatch):
    monkeypatch.setattr(overview, "MAX_SAMPLES", 3)
    line = overview.Timeline(engine.stats, overview.Recent(), overview.Ticks())

    async def take(count):
        for _ in range(count):
            await line.sample()

    asyncio.run(take(5))
    assert [sample[0] for sample in line.since(0)] == [3, 4, 5]
    assert [sample[0] for sample in line.since(4)] == [5]
    assert all(len(sample) == len(COLUMNS) for sample in line.since(0))
    assert dict(zip(COLUMNS, line.since(4)[0], strict=True))["free"] == 1000


def test_sampling_continues_after_a_failed_sample(engine, monkeypatch):
    monkeypatch.setattr(overview, "SAMPLE_SECONDS", 0.001)
    stats, failed = engine.stats, threading.Event()

    def failing():
        if not failed.is_set():
            failed.set()
            raise RuntimeError("once")
        return stats()

    monkeypatch.setattr(engine, "stats", failing)
    with TestClient(create_app(engine, ServeConfig())) as client:
        assert failed.wait(60)  # before a request asks for statistics
        rows = []
        while len(rows) < 2:
            rows = client.get("/cache").json()["timeline"]["rows"]
        assert all(len(row) == len(COLUMNS) for row in rows)


def test_crowd_that_looks_costs_one_look(engine):
    looks = []
    view = engine.view
    engine.view = lambda: looks.append(1) or view()

    async def crowd():
        watch = TreeWatch(engine, overview.Ticks())
        return await asyncio.gather(*(watch.tree() for _ in range(50)))

    trees = asyncio.run(crowd())
    assert len(looks) == 1
    assert all(tree is trees[0] for tree in trees)


def test_tree_that_takes_long_to_look_at_is_looked_at_rarely(engine):
    clock = iter([100.0, 100.0, 100.5, 120.0, 126.0, 126.0, 126.5])
    looks = []
    view = engine.view
    engine.view = lambda: looks.append(1) or view()

    async def look_thrice():
        watch = TreeWatch(engine, overview.Ticks(), lambda: next(clock))
        for _ in range(3):
            await watch.tree()

    asyncio.run(look_thrice())  # at 100 it takes 0.5 s, so it is good for 25 s: at 120 it still is, at 126 not
    assert len(looks) == 2


def test_ages_are_times_of_day(engine):
    clock = iter([1000.0, 1060.0])
    ticks = overview.Ticks(lambda: next(clock))
    remember(engine, "a" * 128)
    ticks.seen(engine.tree.stats().tick)
    remember(engine, "b" * 128)
    tree = asyncio.run(TreeWatch(engine, ticks).tree())
    used = {round(node["used_at"]) for node in tree["nodes"] if node["parent"] is not None}
    assert used == {1000, 1060}


def test_times_of_the_cache_s_clock_are_kept_and_thinned(monkeypatch):
    monkeypatch.setattr(overview, "MAX_TICKS", 16)
    ticks = overview.Ticks(iter(range(1000)).__next__)
    for tick in range(1, 101):
        ticks.seen(10 * tick)
        ticks.seen(10 * tick)  # an idle second leaves no mark
    assert ticks.time_of(1000) == 99
    assert ticks.time_of(991) == 99
    assert ticks.time_of(1) <= 99
    assert abs(ticks.time_of(500) - 49) < 40
    assert len(ticks._times) < 16
