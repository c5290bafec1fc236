"""Constrained answers of an untrained model: required calls are made, and answers fit their schema."""

from __future__ import annotations

import json
import re

import pytest

from headwater.config import ServeConfig
from headwater.engine.detokenizer import byte_table
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import load_model
from tests.checkpoints import checkpoint
from tests.exactness.rig import Make
from tests.server import templates
from tests.server.client import error, send
from tests.server.fake_engine import FakeEngine

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "exact": {"type": "boolean"}},
    "required": ["unit", "exact"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
BODY = {"messages": [{"role": "user", "content": "again and again"}], "max_tokens": 200, "temperature": 1, "seed": 1}
FREE = ServeConfig(reasoning_format="none", tool_calls="free")
FORMATS = {
    "nemotron": templates.SILENT + "{# <TOOLCALL> #}",
    "kimi": templates.SILENT + "{# <|tool_calls_section_begin|> #}",
    "hermes": templates.SILENT + '{# <tool_call>{"name": …, "arguments": …} #}',
    "qwen_xml": templates.SILENT + "{# <tool_call><function=…><parameter=…> #}",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    prepare_process(2)
    numerics.use(Numerics())
    loaded = load_model(checkpoint(tmp_path_factory.mktemp("constrained"), "qwen3_5"), "float32")
    with Make(loaded, SelfCheck(True, None, "compiled"))(500) as rig:
        yield rig.engine


def answer(engine, **body):
    engine.chat_template = body.pop("template", FORMATS["hermes"])
    config = ServeConfig(reasoning_format="none")  # a random model would reason to the end
    response = send(engine, "POST", "/v1/chat/completions", config, json={**BODY, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.parametrize("template", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_call_that_is_required_is_made_and_fits_its_schema(engine, template, choice):
    asked = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    made = answer(engine, template=template, **asked)
    (call,) = made["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert (made["finish_reason"], call["function"]["name"]) == ("tool_calls", "weather")
    assert arguments["unit"] in ("C", "F")
    assert isinstance(arguments["exact"], bool)


@pytest.mark.parametrize("seed", range(3))
def test_answer_fits_its_schema(engine, seed):
    asked = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
    made = answer(engine, response_format=asked, seed=seed)
    assert made["finish_reason"] == "stop"
    assert set(json.loads(made["message"]["content"])) == {"unit", "exact"}


GUIDED = {
    "structured_outputs": ({"regex": "[a-f]{4}"}, "[a-f]{4}"),
    "guided_choice": (["red", "green/blue"], "red|green/blue"),
    "guided_grammar": ('root ::= word ("-" word){2}\nword ::= [xyz]', "[xyz]-[xyz]-[xyz]"),
    "guided_json": (SCHEMA, r"\{.*\}"),
}


@pytest.mark.parametrize("name", GUIDED)
def test_completions_and_chats_match_their_guided_constraint(engine, name):
    value, pattern = GUIDED[name]
    body = {"prompt": "again and again", "max_tokens": 200, "seed": 2, name: value}
    completed = send(engine, "POST", "/v1/completions", json=body).json()["choices"][0]
    chatted = answer(engine, **{name: value})
    for text, choice in ((completed["text"], completed), (chatted["message"]["content"], chatted)):
        assert re.fullmatch(pattern, text, re.DOTALL)
        assert choice["finish_reason"] == "stop"


def test_call_begun_by_the_model_fits_a_known_tools_schema(engine):
    tag = engine.tokenizer.token_to_id("<tool_call>")
    asked = {"tools": [TOOL], "logit_bias": {str(tag): 100}, "max_tokens": 300}
    free = send(engine, "POST", "/v1/chat/completions", FREE, json={**BODY, **asked, "seed": 4}).json()["choices"][0]
    assert not free["message"].get("tool_calls")  # of random text
    made = answer(engine, **asked)
    calls = [call["function"] for call in made["message"]["tool_calls"]]
    assert len(calls) > 1
    for call in calls[: -1 if made["finish_reason"] == "length" else None]:
        assert call["name"] == "weather"
        assert set(json.loads(call["arguments"])) == {"unit", "exact"}


def is_text(raw):
    """Return whether a token's bytes are UTF-8: held text is, while a random model writes any bytes."""
    try:
        return bool(raw.decode())
    except UnicodeDecodeError:
        return False


def test_text_without_calls_is_the_same_held_or_free(engine):
    table = byte_table(engine.tokenizer)
    banned = [token for token in range(engine.tokenizer.get_vocab_size()) if not is_text(table.raw(token))]
    banned.append(engine.tokenizer.token_to_id("<tool_call>"))
    asked = {**BODY, "tools": [TOOL], "max_tokens": 60, "logit_bias": dict.fromkeys(map(str, banned), -100)}
    engine.chat_template = FORMATS["hermes"]
    held = send(engine, "POST", "/v1/chat/completions", ServeConfig(reasoning_format="none"), json=asked)
    free = send(engine, "POST", "/v1/chat/completions", FREE, json=asked)
    assert held.json()["choices"] == free.json()["choices"]


def test_constrained_decoding_changes_no_bit_of_cached_content(engine):
    def scored(salt, *first):
        for body in first:
            send(engine, "POST", "/v1/completions", json={**body, "cache_salt": salt})
            assert engine.drain(60)
        text = "again and again " * 40
        body = {"prompt": text + "ab", "max_tokens": 8, "temperature": 0, "logprobs": 5, "cache_salt": salt}
        answered = send(engine, "POST", "/v1/completions", json=body).json()
        return answered["choices"][0]["logprobs"], answered["headwater"]["cached_tokens"]

    long = {"prompt": "again and again " * 40, "max_tokens": 80, "seed": 1}
    cold, none = scored("cold")
    hit, cached = scored("held", {**long, "guided_regex": "(ab)+", "min_tokens": 70})
    assert (none, cached > 0) == (0, True)
    assert hit == cold


def test_answer_has_its_least_number_of_tokens(engine):
    ends = [*range(0, 2000, 2)]
    body = {"prompt": "again", "max_tokens": 50, "seed": 1, "stop_token_ids": ends[:64], "stop": ["e", " ", "a"]}
    short = send(engine, "POST", "/v1/completions", json=body).json()["usage"]["completion_tokens"]
    long = send(engine, "POST", "/v1/completions", json={**body, "min_tokens": 20}).json()["usage"]["completion_tokens"]
    assert short < 20 <= long <= 50
    body = {"prompt": "again", "min_tokens": 20, "max_tokens": 50, "guided_choice": ["abc"]}
    complete = send(engine, "POST", "/v1/completions", json=body).json()
    assert complete["choices"][0]["text"] == "abc"  # a complete constraint ends the answer


def test_log_probabilities_of_a_prompt_are_in_vllm_s_form(engine):
    body = {"prompt": "again and again", "max_tokens": 1, "prompt_logprobs": 2}
    answered = send(engine, "POST", "/v1/completions", json=body).json()
    first, *others = answered["choices"][0]["prompt_logprobs"]
    ids = engine.tokenizer.encode("again and again").ids
    assert first is None
    assert len(others) == len(ids) - 1 == answered["usage"]["prompt_tokens"] - 1
    for token, row in zip(ids[1:], others, strict=True):
        own = row[str(token)]
        assert own["decoded_token"] == engine.tokenizer.decode([token])
        assert own["logprob"] <= 0
        assert len(row) in (2, 3)
        assert sorted(one["rank"] for one in row.values())[:2] == [1, 2]
        assert all((one["rank"] < own["rank"]) == (one["logprob"] > own["logprob"]) for one in row.values())
    chatted = send(engine, "POST", "/v1/chat/completions", json={**BODY, "max_tokens": 1, "prompt_logprobs": 0}).json()
    assert len(chatted["prompt_logprobs"]) == chatted["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in chatted["choices"][0]


def test_echoed_and_scored_prompts_each_have_their_number_of_tokens(engine):
    body = {"prompt": "again and again", "max_tokens": 0, "prompt_logprobs": 3, "echo": True, "logprobs": 1}
    choice = send(engine, "POST", "/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == "again and again"
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} == {1}
    assert {len(row) for row in choice["prompt_logprobs"][1:]} <= {3, 4}
    alone = send(engine, "POST", "/v1/completions", json={**body, "echo": None, "logprobs": None}).json()["choices"][0]
    assert (alone["text"], alone["prompt_logprobs"]) == ("", choice["prompt_logprobs"])


EXTREME = [
    {"repetition_penalty": 0.01, "temperature": 1e-320},
    {"presence_penalty": -2, "frequency_penalty": -2, "repetition_penalty": 2, "temperature": 2},
    {"top_p": 1e-30, "min_p": 1, "top_k": 2**31 - 1},
    {"seed": 2**63 - 1, "n": 2},
    {"seed": -(2**63)},
    {"logit_bias": {str(i): -100 for i in range(1024)}, "min_tokens": 4},
    {"guided_regex": "", "min_tokens": 3},
    {"timeout": 604_800},
]


@pytest.mark.parametrize("body", EXTREME, ids=str)
def test_sampling_at_the_ends_of_its_ranges_is_answered(engine, body):
    response = send(engine, "POST", "/v1/completions", json={"prompt": "again and again", "max_tokens": 4, **body})
    assert response.status_code == 200, response.text


def test_constraint_that_no_text_fits_is_refused(engine):
    for body in ({"guided_regex": "[a&&b]"}, {"guided_grammar": "root ::= root"}):
        response = send(engine, "POST", "/v1/completions", json={"prompt": "again", "max_tokens": 4, **body})
        assert error(response)["param"] == next(iter(body))


def test_invalid_schema_is_refused_with_its_parameter(engine):
    bad = {"type": "json_schema", "json_schema": {"name": "w", "schema": {"type": "nosuch"}}}
    response = send(engine, "POST", "/v1/chat/completions", json={**BODY, "response_format": bad})
    assert error(response)["code"] == "invalid_constraint"
    assert error(response)["param"] == "response_format"
    assert "nosuch" in error(response)["message"]


def test_reasoning_is_closed_after_its_budget(engine):
    asked = {"max_tokens": 60, "thinking_token_budget": 6, "template": templates.REASONING}
    engine.chat_template = asked.pop("template")
    response = send(engine, "POST", "/v1/chat/completions", json={**BODY, **asked})
    (choice,) = response.json()["choices"]
    thought = choice["message"]["reasoning_content"]
    assert 0 < len(engine.tokenizer.encode(thought).ids) <= 6 + 1  # encoded again
    assert choice["message"]["content"]
    budget = {"type": "enabled", "budget_tokens": 6}
    body = {"messages": BODY["messages"], "max_tokens": 60, "thinking": budget}
    blocks = send(engine, "POST", "/v1/messages", json=body).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]


def test_limit_of_reasoning_without_a_token_at_its_end_is_noted():
    fake = FakeEngine(chat_template=templates.REASONING)  # its tokens are bytes
    fake.start()
    asked = {"messages": BODY["messages"], "thinking_token_budget": 6}
    told = send(fake, "POST", "/v1/chat/completions", json=asked).json()
    fake.stop()
    assert "the limit of reasoning" in str(told["headwater"]["warnings"])
    assert fake.seen[0].params.constraint is None
