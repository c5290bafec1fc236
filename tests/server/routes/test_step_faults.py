"""Faults in a step, as HTTP clients see them: a 500 that names its request, and a server that lives on."""

import asyncio
import json

import httpx
import pytest

from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import LoadedModel, load_model
from headwater.server.app import create_app
from tests.checkpoints import checkpoint
from tests.engine.test_faults import breaking

PAGES = 300
PATIENCE = 60  # seconds
BODIES = [{"prompt": [i + 2] * 100, "max_tokens": 6, "temperature": 0, "ignore_eos": True} for i in range(3)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    prepare_process(2)
    numerics.use(Numerics())
    return load_model(checkpoint(tmp_path_factory.mktemp("step_faults"), "qwen3_5"), "float32")


@pytest.fixture
def engine(loaded):
    made = Engine.over(
        loaded, SelfCheck(True, None, "compiled"), ServeConfig(memory=PAGES * loaded.spec.page_bytes, max_running=8)
    )
    made.start()
    yield made
    made.stop()


def post_all(engine, bodies):
    """Send requests concurrently to one app."""

    async def go():
        app = create_app(engine, ServeConfig())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=PATIENCE) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    return asyncio.run(go())


def assert_lives_on(engine, expected):
    assert [said(reply) for reply in post_all(engine, BODIES)] == expected
    assert engine.health()["status"] == "ok"
    assert engine.drain(PATIENCE)
    cache = engine.scheduler.cache
    cache.check()
    stats = cache.stats()
    assert stats.leases == stats.open_plans == stats.pages_private == stats.pages_slot == 0


def said(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


PLACES = {
    "run": lambda engine: (engine.runner, "run"),
    "sample": lambda engine: (engine.verification, "choices"),
    "commit": lambda engine: (engine.scheduler.cache, "commit"),
    "reserve": lambda engine: (engine.scheduler.cache, "reserve"),
}


@pytest.mark.parametrize("place", PLACES)
def test_fault_in_a_step_returns_500_and_server_keeps_serving(engine, monkeypatch, place):
    expected = [said(reply) for reply in post_all(engine, BODIES)]
    target, name = PLACES[place](engine)
    monkeypatch.setattr(target, name, breaking(getattr(target, name), lambda call: call == 2))
    replies = post_all(engine, [body | {"cache_salt": "new"} for body in BODIES])
    monkeypatch.undo()
    failed = [reply for reply in replies if reply.status_code != 200]
    assert failed
    for reply in failed:
        assert reply.status_code == 500
        error = reply.json()["error"]
        assert error["type"] == "server_error"
        assert reply.headers["x-request-id"] in error["message"]
    assert_lives_on(engine, expected)


def test_stream_whose_step_fails_ends_with_an_error_event(engine, monkeypatch):
    expected = [said(reply) for reply in post_all(engine, BODIES)]
    runner = engine.runner
    monkeypatch.setattr(runner, "run", breaking(runner.run, lambda call: call == 4))
    streamed = [body | {"stream": True, "max_tokens": 40, "cache_salt": "new"} for body in BODIES]
    replies = post_all(engine, streamed)
    monkeypatch.undo()
    failed = 0
    for reply in replies:
        if reply.status_code == 500:  # it had no token yet
            failed += 1
            continue
        assert reply.status_code == 200  # the head was sent before
        events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        last = json.loads(events[-2])
        if "error" in last:
            failed += 1
            assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "internal_error")
            assert reply.headers["x-request-id"] in last["error"]["message"]
    assert failed
    assert_lives_on(engine, expected)


def test_request_with_several_answers_of_which_one_fails_leaves_nothing_behind(engine, monkeypatch):
    expected = [said(reply) for reply in post_all(engine, BODIES)]
    cache = engine.scheduler.cache
    monkeypatch.setattr(cache, "commit", breaking(cache.commit, lambda call: call == 2))
    (reply,) = post_all(engine, [BODIES[0] | {"n": 4, "temperature": 1.0, "max_tokens": 200, "cache_salt": "new"}])
    monkeypatch.undo()
    assert reply.status_code == 500
    assert_lives_on(engine, expected)  # its other answers were cancelled, so nothing runs on
