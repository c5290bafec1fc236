"""Hints that clients give: `ttl` of `cache_control`, and `cache_hints`."""

import time

import pytest

from headwater.config import ServeConfig
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import load_model
from tests.checkpoints import checkpoint
from tests.exactness.rig import Make
from tests.server import templates
from tests.server.client import error, send

MESSAGES = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 10},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "hello", "stream": False},
}
ENDED = {"cache_hints": {"conversation_ended": True}}


@pytest.mark.parametrize("path", BODIES)
def test_each_api_takes_the_end_of_a_conversation(path, engine):
    for hints in ({"conversation_ended": True}, {"conversation_ended": False}, {}, None):
        assert send(engine, "POST", path, json={**BODIES[path], "cache_hints": hints}).status_code == 200
    assert [seen.ended for seen in engine.seen] == [True, False, False, False]
    assert not engine.seen[0].keep_output  # no next turn would resume after the answer
    assert engine.seen[1].keep_output == engine.seen[-1].keep_output


@pytest.mark.parametrize("path", BODIES)
def test_each_api_takes_a_priority(path, engine):
    for priority in ("low", "normal", "high", None):
        body = {**BODIES[path], "cache_hints": {"priority": priority}}
        assert send(engine, "POST", path, json=body).status_code == 200
    assert [seen.priority for seen in engine.seen] == [-1, 0, 1, 0]
    assert not any(seen.ended for seen in engine.seen)


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        ({"conversation_ended": "yes"}, "conversation_ended"),
        ({"priority": 3}, "priority"),
        ({"priority": "highest"}, "priority"),
        ({"session": "a"}, "session"),
        ([], "cache_hints"),
    ],
)
def test_other_hints_are_refused_by_name(hints, message, engine):
    refused = error(send(engine, "POST", "/v1/chat/completions", json={"messages": MESSAGES, "cache_hints": hints}))
    assert message in refused["message"]
    assert refused["param"].startswith("cache_hints")


def marked(ttl):
    control = {"type": "ephemeral", "ttl": ttl}
    return {"role": "user", "content": [{"type": "text", "text": "hello " * 50, "cache_control": control}]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(("ttl", "seconds"), [("5m", [300.0]), ("1h", [3600.0]), (None, [])])
def test_ttl_of_a_block_is_converted_to_seconds(path, ttl, seconds, engine):
    body = {"messages": [marked(ttl)], "max_tokens": 10}
    assert send(engine, "POST", path, json=body).status_code == 200
    assert [one.seconds for one in engine.seen[0].boundaries.retained] == seconds


def test_ttl_of_an_input_item_is_applied(engine):
    (part,) = marked("1h")["content"]
    item = {"type": "message", "role": "user", "content": [{**part, "type": "input_text"}]}
    assert send(engine, "POST", "/v1/responses", json={"input": [item]}).status_code == 200
    assert [one.seconds for one in engine.seen[0].boundaries.retained] == [3600.0]


def test_ttl_of_a_tool_is_applied(engine):
    control = {"type": "ephemeral", "ttl": "5m"}
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}, "cache_control": control}
    body = {"messages": [{"role": "user", "content": "hello " * 50}], "tools": [tool]}
    assert send(engine, "POST", "/v1/chat/completions", json=body).status_code == 200
    assert [one.seconds for one in engine.seen[0].boundaries.retained] == [300.0]


@pytest.mark.parametrize(("of_block", "of_request", "seconds"), [(None, "1h", 3600.0), ("1h", "5m", 3600.0)])
def test_ttl_of_a_whole_request_is_applied(of_block, of_request, seconds, engine):
    control = {"type": "ephemeral", "ttl": of_request}
    body = {"messages": [marked(of_block)], "max_tokens": 10, "cache_control": control}
    assert send(engine, "POST", "/v1/messages", json=body).status_code == 200
    assert [one.seconds for one in engine.seen[0].boundaries.retained] == [seconds]
    refused = send(engine, "POST", "/v1/messages", json={**body, "cache_control": {**control, "ttl": "2h"}})
    assert refused.status_code == 400


@pytest.mark.parametrize("ttl", ["2h", "5 minutes", 300])
def test_unsupported_ttl_is_refused_with_the_accepted_values(ttl, engine):
    refused = error(send(engine, "POST", "/v1/chat/completions", json={"messages": [marked(ttl)]}))
    assert refused["message"].startswith(f"ttl of cache_control is {ttl!r}, it must be '5m' or '1h'")
    assert refused["param"] == "messages"
    answer = send(engine, "POST", "/v1/messages", json={"messages": [marked(ttl)], "max_tokens": 10})
    assert answer.status_code == 400
    assert "it must be '5m' or '1h'" in answer.json()["error"]["message"]


def test_hints_change_no_bit_of_an_answer(tmp_path):
    prepare_process(2)
    numerics.use(Numerics())
    loaded = load_model(checkpoint(tmp_path, "qwen3_5"), "float32")
    answers = []
    for hints, ttl in (({}, None), (ENDED, None), ({}, "1h"), (ENDED, "5m")):
        with Make(loaded, SelfCheck(True, None, "compiled"))(500) as rig:
            assert rig.engine.scheduler.cache.policy.clock is time.monotonic
            rig.engine.chat_template = templates.SILENT
            body = {"messages": [marked(ttl)], "max_tokens": 30, "temperature": 0, "ignore_eos": True, **hints}
            sent = [
                send(rig.engine, "POST", "/v1/chat/completions", ServeConfig(reasoning_format="none"), json=body)
                for _ in range(2)
            ]
            assert sent[1].json()["headwater"]["cached_tokens"] > 0
            answers += [one.json()["choices"][0]["message"] for one in sent]
    assert all(answer == answers[0] for answer in answers)
