"""`make soak` in small, and what it stands on: nothing is lost, and nothing grows with the number of requests."""

import asyncio
import gc
import io
import logging
import re
import time
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import headwater
from benchmarks.engines import Model
from headwater.cache.history import History
from headwater.cache.index import Index
from headwater.config import ServeConfig
from headwater.engine.proof import verdict
from headwater.mixers.numerics import prepare_process
from headwater.models.files import embedded
from headwater.server.http.connection import LINGER_SECONDS
from stress import live_server
from stress.census import INSTANCES, census, grown
from stress.draw import Draw
from stress.live_server import LiveServer, embedded_model
from stress.memory import CAPACITIES, PAGES, SLACK
from stress.short_requests import ShortRequests, send_over_http
from stress.soak import Limits, arguments, soak
from stress.visits import KINDS
from tests.support import FULL

VISITS = 60 if FULL else 20
VISITED = 150  # requests over HTTP, of each half
PATIENCE = 300  # seconds: the number of visits ends a soak long before


@pytest.fixture(scope="module")
def model():
    logger = logging.getLogger("headwater.request")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield embedded_model()
    logger.setLevel(level)


@pytest.mark.parametrize("load", [embedded_model, lambda: Model(embedded())], ids=["stress", "benchmarks"])
def test_self_check_runs_once_for_all_runs(model, monkeypatch, tmp_path, load):
    checked = []

    def check(spec, *given, **more):
        checked.append(spec)
        return replace(model[1], deterministic=True)

    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(verdict, "self_check", check)
    load()
    load()
    assert len(checked) == 1


def test_soaks_model_is_held_and_computed_as_asked_for(model, monkeypatch):
    told, asked = io.StringIO(), arguments(["--dtype", "bfloat16", "--weights", "int4", "--threads", "1"])
    monkeypatch.setattr(live_server, "verdict", lambda spec, device: model[1])
    try:
        served = live_server.embedded_model(asked.dtype, asked.weights, asked.threads)
        soak(seed=3, limits=Limits(PATIENCE, 2, clients=1), model=served, console=Console(file=told, width=140))
    finally:
        prepare_process(2)
    assert "computed in: bfloat16, weights int4, 1 threads" in told.getvalue()


@pytest.mark.parametrize("speculation", ["off", pytest.param("ngram", marks=pytest.mark.quick)])
def test_short_soak_loses_nothing(model, speculation):
    told = io.StringIO()
    run = soak(1, Limits(PATIENCE, VISITS, clients=6), model, Console(file=told, width=140), speculation)
    assert not run.faults, told.getvalue()
    stats = run.server.engine.stats()
    assert len(run.equal) == (1 if speculation == "off" else 3)
    assert bool(stats.accepted_drafts + stats.rejected_drafts) == (speculation != "off")
    assert run.visits >= VISITS
    assert run.samples.kept
    assert stats.cache.evicted_checkpoints > 0  # so that memory was tiny indeed
    assert all(kind.__name__ in told.getvalue() for kind in KINDS)


def test_soak_reuses_states_that_an_earlier_server_stored(model, tmp_path):
    told, loaded = io.StringIO(), []
    for _ in range(2):
        run = soak(1, Limits(PATIENCE, VISITS // 2, clients=6), model, Console(file=told, width=140), tier=tmp_path)
        assert not run.faults, told.getvalue()
        stats = run.server.engine.stats()
        loaded.append(stats.loaded_tokens)
        assert stats.tiers[0].errors == stats.tiers[0].corrupt == 0
    assert loaded[1] > 0, "what the first server stored"


def test_soak_notices_answers_that_differ(model, monkeypatch):
    """The comparison is not empty: with one logit moved on the server that caches, it fails."""
    run_step, broken = LiveServer.__enter__, []

    def start(server):
        if not broken:  # the first server is the one that caches
            broken.append(server)
            run = server.engine.runner.run
            server.engine.runner.run = lambda step: run(step) * 1.01
        return run_step(server)

    monkeypatch.setattr(LiveServer, "__enter__", start)
    limits = Limits(PATIENCE, 25 if FULL else 12, clients=4)
    run = soak(2, limits, model, Console(file=io.StringIO()), speculation="ngram")
    assert run.samples.kept
    for name in ("without a cache", "without drafts", "without either"):
        assert sum(f"not as {name}" in fault for fault in run.faults) == len(run.samples.kept)


def test_soak_notices_a_page_that_is_lost(model):
    with LiveServer(*model, 200) as server:
        server.check_idle()
        server.engine.scheduler.cache.pool.kv.take(1)
        with pytest.raises(AssertionError):
            server.check_idle()


def test_the_same_seed_draws_the_same_requests():
    assert [Draw(3, i).chat() for i in range(20)] == [Draw(3, i).chat() for i in range(20)]
    assert Draw(3, 1).completion() != Draw(3, 2).completion()


@pytest.mark.parametrize("container", CAPACITIES)
def test_each_container_with_a_capacity_exists(container):
    name, attribute = re.split(r"\.|: ", container)
    sources = [path.read_text() for path in Path(headwater.__file__).parent.rglob("*.py")]
    [source] = [source for source in sources if re.search(rf"\nclass {name}\b", source)]
    assert attribute == INSTANCES or f"self.{attribute}" in source


@pytest.fixture
def few_objects():
    """Leave what there is by now out of the census, which visits all else: kernels that were compiled are a million."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("few_objects")
def test_history_that_is_full_stays_within_its_capacity():
    """Its prompts are of ever new namespaces, each of one unit: as many nodes as there can be."""
    history = History(4, 4 * PAGES)
    before, most = census(), Counter[str]()
    for number in range(10 * PAGES):
        index = Index(4, 0)
        history.note(str(number), index.add(index.root(""), b"unit", 1, array("i")))
        if number % PAGES == PAGES - 1:
            most |= census()
    assert most["Index.roots"] > 4 * PAGES
    kinds = "Index.roots", "Root: instances", "Root.children", "Node: instances", "Node.children"
    assert not {*kinds} & {*grown(before, most, CAPACITIES, SLACK)}


@pytest.mark.full
def test_nothing_grows_with_the_number_of_requests_namespaces_or_clients(model):
    """Thousands of requests with ever new salts and ids, some cancelled or hung up on: no container holds more."""
    with LiveServer(*model, 400, max_waiting=64) as server:
        requests = ShortRequests(server.engine)
        counts = []
        for half in range(2):
            requests.send(1000)
            asyncio.run(send_over_http(server.url, server.port, VISITED, first=VISITED * half))
            server.check_idle()
            time.sleep(2 * LINGER_SECONDS)  # closed connections are held until their last timer
            counts.append(census())
        assert server.engine.stats().cache.namespaces < 400
    assert min(requests.ended.answered, requests.ended.cancelled) > 100
    assert grown(*counts, CAPACITIES, SLACK) == {}


@pytest.mark.usefixtures("few_objects")
def test_census_sees_a_container_that_grows(model):
    server = LiveServer(*model, 200)
    before = census()
    server.engine.loop.cancelled.update(range(1000))
    hoard = [ServeConfig() for _ in range(100)]
    found = grown(before, census(), {}, SLACK)
    assert found["StepLoop.cancelled"][1] - found["StepLoop.cancelled"][0] == 1000
    assert found["ServeConfig: instances"][1] - found["ServeConfig: instances"][0] == len(hoard)
    server._socket.close()
