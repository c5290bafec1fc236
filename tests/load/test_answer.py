"""Streams of servers that do not keep to OpenAI's form: unknown fields and events are ignored."""

from __future__ import annotations

import json

import pytest

from headwater.load.answer import Answer
from headwater.load.endpoint import ServerError, first_model

ODD = (
    {"choices": 5},
    {"choices": [None, 5, "x"]},
    {"choices": [{"delta": 5, "text": 5, "finish_reason": 5}]},
    {"choices": [{"delta": {"content": 5, "reasoning": [], "tool_calls": 5}}]},
    {"choices": [{"delta": {"tool_calls": [None, {"function": 5}, {"function": {"name": 5}}]}}]},
    {"usage": 5, "headwater": 5},
    {"usage": {"prompt_tokens_details": 5}},
    {"usage": {"prompt_tokens": "9", "completion_tokens": -1, "prompt_tokens_details": {"cached_tokens": True}}},
    {"usage": {"prompt_tokens": 1.5}, "headwater": {"reason": {}, "resumed_at": "5"}},
)


@pytest.mark.parametrize("event", ODD, ids=str)
def test_an_odd_event_changes_nothing_of_the_answer(event):
    answer = Answer()
    for one in (
        {"choices": [{"delta": {"content": "a"}}]},
        event,
        {"choices": [{"text": "b", "finish_reason": "stop"}]},
    ):
        answer.feed(f"data: {json.dumps(one)}\n\n".encode(), 0.0)
    assert (answer.text, answer.reasoning, answer.finish_reason, answer.fault) == ("ab", "", "stop", None)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (None, None, None)
    assert (answer.reason, answer.resumed_at) == (None, None)


@pytest.mark.parametrize("data", [[{}], [{"name": "m"}], [None], ["m"], {"id": "m"}, [{"id": 5}], "m", 5], ids=str)
def test_an_odd_list_of_models_is_shown_in_the_error(data):
    with pytest.raises(ServerError, match=r"data of /v1/models is .*: name the model") as raised:
        first_model({"/v1/models": {"data": data}})
    assert str(data) in str(raised.value)


@pytest.mark.parametrize("page", [{"data": []}, {}, None, [], 404, "not found", {"data": None}], ids=str)
def test_a_server_that_lists_no_model_is_asked_for_the_default_one(page):
    assert first_model({"/v1/models": page}) == "default"
    assert first_model({"/v1/models": {"data": [{"id": "a"}, {"id": "b"}]}}) == "a"
