"""Streams of servers that do not keep to OpenAI's form: what is odd in them is as good as not there."""

from __future__ import annotations

import json

import pytest

from headwater.load.answer import Answer

ODD = (
    {"choices": 5},
    {"choices": [None, 5, "x"]},
    {"choices": [{"delta": 5, "text": 5, "finish_reason": 5}]},
    {"choices": [{"delta": {"content": 5, "reasoning": [], "tool_calls": 5}}]},
    {"choices": [{"delta": {"tool_calls": [None, {"function": 5}, {"function": {"name": 5}}]}}]},
    {"usage": 5, "headwater": 5},
    {"usage": {"prompt_tokens_details": 5}},
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
    assert answer.cached_tokens is None
