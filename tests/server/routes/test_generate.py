"""Several answers, echoes and sampling fields, on both endpoints, whole and streamed."""

import json

import pytest

from headwater.config import ServeConfig
from tests.server.client import send

HELLO = [{"role": "user", "content": "hello"}]


def complete(engine, config=None, **fields):
    body = {"prompt": "abc", "max_tokens": 100, **fields}
    return send(engine, "POST", "/v1/completions", config, json=body)


def chat(engine, **fields):
    return send(engine, "POST", "/v1/chat/completions", json={"messages": HELLO, "max_tokens": 100, **fields})


def texts(response):
    """Return the text of each choice of a completion's stream."""
    found = {}
    for line in response.text.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def test_n_answers_to_each_prompt_are_numbered_prompt_by_prompt(engine):
    answer = complete(engine, prompt=["a", "bb"], n=3, best_of=3, seed=7).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [len(g.prompt) for g in engine.seen] == [1, 1, 1, 2, 2, 2]
    assert [(g.params.seed, g.params.choice) for g in engine.seen] == [(7, 0), (7, 1), (7, 2)] * 2
    assert len(answer["headwater"]) == 6


def test_prompt_counts_once_however_many_answers_it_has(engine):
    size = len(engine.script.encode())
    answer = complete(engine, prompt=["a" * 200, "b" * 300], n=2).json()
    assert answer["usage"]["prompt_tokens"] == 500
    assert answer["usage"]["completion_tokens"] == 4 * size
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}  # the second answers' hits are our own
    assert [account["cached_tokens"] for account in answer["headwater"]] == [0, 192, 0, 256]


def test_n_answers_stream_side_by_side(engine):
    assert texts(complete(engine, n=2, stream=True)) == {0: engine.script, 1: engine.script}


def test_n_answers_of_a_chat(engine):
    answer = chat(engine, n=2).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert engine.seen[0].prompt == engine.seen[1].prompt
    assert answer["usage"]["prompt_tokens"] == len(engine.seen[0].prompt)
    assert [g.params.seed for g in engine.seen] == [None, None]


def test_echo_begins_with_the_prompt(engine):
    choices = complete(engine, prompt=["ab", "c"], echo=True, n=2).json()["choices"]
    assert [choice["text"] for choice in choices] == [f"ab{engine.script}"] * 2 + [f"c{engine.script}"] * 2
    (choice,) = complete(engine, prompt=[1, 2], echo=True).json()["choices"]
    assert choice["text"] == engine.tokenizer.decode([1, 2]) + engine.script


def test_echo_streams_first_and_is_not_counted_as_output(engine):
    response = complete(engine, echo=True, stream=True, stream_options={"include_usage": True})
    assert texts(response) == {0: f"abc{engine.script}"}
    usage = json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))["usage"]
    assert usage["completion_tokens"] == len(engine.script.encode())


def test_penalties_and_biases_reach_the_engine(engine):
    given = {"presence_penalty": 0.5, "frequency_penalty": -1.0, "repetition_penalty": 1.5}
    complete(engine, logit_bias={"3": -100, "257": 2.5}, **given)
    params = engine.seen[0].params
    assert {name: getattr(params, name) for name in given} == given
    assert params.logit_bias == ((3, -100.0), (257, 2.5))


def test_greedy_default_model_samples_only_if_temperature_is_given(engine):
    engine.generation_defaults = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.25}
    complete(engine)
    complete(engine, temperature=0.5)
    assert [g.params.temperature for g in engine.seen] == [0.0, 0.5]
    assert engine.seen[0].params.repetition_penalty == 1.25


@pytest.mark.parametrize(
    ("asked", "limit", "deadline", "by"),
    [
        (None, None, None, "timeout"),
        (3, None, 3, "timeout"),
        (None, 9.0, 9, "request_timeout"),
        (3, 9.0, 3, "timeout"),
        (30, 9.0, 9, "request_timeout"),
    ],
)
def test_requests_timeout_is_its_deadline_within_the_servers(engine, asked, limit, deadline, by):
    complete(engine, ServeConfig(request_timeout=limit), timeout=asked)
    assert (engine.seen[0].deadline, engine.seen[0].deadline_of) == (deadline, by)


def test_openai_fields_without_effect_are_ignored(engine):
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    assert chat(engine, **ignored).status_code == 200


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/responses", {"input": "hello"}),
    ],
)
def test_no_line_end_of_unicode_ends_a_streams_line(engine, path, asked):
    engine.script = "a\x85\u2028\u2029\x0b\x1c\r\nb"  # httpx's iter_lines, which litellm uses, splits at each
    lines = send(engine, "POST", path, json={**asked, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert all(line == "" or line.startswith(("data: {", "data: [DONE]", "event: ")) for line in lines)
    said = [e.get("delta") or "" for e in events if e.get("type") == "response.output_text.delta"]
    for choice in (choice for event in events for choice in event.get("choices", ())):
        said.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
    assert "".join(said) == engine.script
