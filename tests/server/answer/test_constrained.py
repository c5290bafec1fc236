"""Constrained answers of an untrained model: required calls are made, and answers fit their schema."""

from __future__ import annotations

import json

import pytest

from headwater.config import ServeConfig
from headwater.engine.selfcheck import SelfCheck
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import load_model
from tests.checkpoints import checkpoint
from tests.exactness.rig import Make
from tests.server import templates
from tests.server.client import error, send

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "exact": {"type": "boolean"}},
    "required": ["unit", "exact"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
BODY = {"messages": [{"role": "user", "content": "again and again"}], "max_tokens": 200, "temperature": 1, "seed": 1}
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
    with Make(loaded, SelfCheck(True, None, "packed"))(500) as rig:
        yield rig.engine


def answer(engine, **body):
    engine.chat_template = body.pop("template", FORMATS["hermes"])
    config = ServeConfig(reasoning_format="none")  # a random model would reason to the end
    response = send(engine, "POST", "/v1/chat/completions", config, json={**BODY, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.parametrize("template", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_required_is_made_and_fits_its_schema(engine, template, choice):
    asked = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    made = answer(engine, template=template, **asked)
    (call,) = made["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert (made["finish_reason"], call["function"]["name"]) == ("tool_calls", "weather")
    assert arguments["unit"] in ("C", "F")
    assert isinstance(arguments["exact"], bool)


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_fits_its_schema(engine, seed):
    asked = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
    made = answer(engine, response_format=asked, seed=seed)
    assert made["finish_reason"] == "stop"
    assert set(json.loads(made["message"]["content"])) == {"unit", "exact"}


def test_a_schema_that_is_none_is_told(engine):
    bad = {"type": "json_schema", "json_schema": {"name": "w", "schema": {"type": "nosuch"}}}
    response = send(engine, "POST", "/v1/chat/completions", json={**BODY, "response_format": bad})
    assert error(response)["code"] == "invalid_constraint"
    assert "nosuch" in error(response)["message"]
