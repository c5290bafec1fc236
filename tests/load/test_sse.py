"""Streams of server-sent events, and the answers that a client reads from them."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.load.answer import Answer, EventParser
from headwater.load.endpoint import ServerError, first_model
from tests.load.openai_server import chunk, usage

STREAM = ': hello\n\ndata: {"a": "ü"}\n\nid: 7\nevent: x\ndata:one\ndata:  two\nretry: 3\n\n\ndata: [DONE]\n\ndata: cut'
EVENTS = ['{"a": "ü"}', "one\n two", "[DONE]"]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@given(cuts=st.lists(st.integers(0, 120)))
def test_any_cut_gives_the_same_events(newline, cuts):
    data = STREAM.replace("\n", newline).encode()
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parser = EventParser()
    events = [event for a, b in pairwise(bounds) for event in parser.feed(data[a:b])]
    assert [event.decode() for event in events] == EVENTS


def fed(*events):
    """An answer fed with one event a second."""
    answer = Answer()
    for second, event in enumerate(events):
        answer.feed(f"data: {json.dumps(event)}\n\n".encode(), float(second))
    return answer


def test_the_first_token_is_the_first_event_that_carries_one():
    answer = fed(chunk("", role="assistant"), chunk("a"), chunk(""), chunk("b"), chunk("", "stop"), usage(9, 2, 4))
    assert (answer.first, answer.last, answer.gaps) == (1.0, 3.0, [2.0])
    assert (answer.text, answer.finish_reason, answer.fault) == ("ab", "stop", None)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (9, 4, 2)
    assert answer.resumed_at == 4


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
    ],
)
def test_reasoning_and_tool_calls_are_tokens_but_no_text(delta):
    answer = fed({"choices": [{"delta": delta}]}, chunk("a", "stop"))
    assert answer.first == 0.0
    assert answer.text == "a"
    assert answer.reasoning == ("hm" if "tool_calls" not in delta else "")


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([chunk("a")], "ended before"),
        ([chunk("a"), {"error": {"message": "midway"}}], "midway"),
        ([chunk("a", "stop"), [1]], "must be an object"),
        ([], "ended before"),
    ],
)
def test_an_answer_that_is_not_whole_has_a_fault(events, fault):
    assert fault in fed(*events).fault


def test_a_server_that_tells_no_usage_leaves_it_unknown():
    answer = fed(chunk("a", "stop"), {"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": None}})
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (3, None, None)


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
