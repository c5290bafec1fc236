"""Widely used clients against a server on a real socket: tools, streams, structured answers."""

from __future__ import annotations

import json
import os
import socket

import openai
import pytest
from pydantic import BaseModel

from headwater.config import ServeConfig
from headwater.server.app import create_app
from tests.server import templates
from tests.server.fake_engine import FakeEngine
from tests.server.routes.test_serving import Server

# nothing may be fetched: what these would look up comes with them
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false"}

HELLO = [{"role": "user", "content": "How is the weather in Bonn?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
VALUES = "<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n2\n</parameter>"
XML = f"<tool_call>\n<function=weather>\n{VALUES}\n</function>\n</tool_call>"
TWO = f"The user asks.\n</think>\n\nI look.\n\n{XML}\n{XML.replace('Bonn', 'Köln')}"
CALLED = [{"city": "Bonn", "days": 2}, {"city": "Köln", "days": 2}]
QWEN = templates.REASONING + "{# <function= and <parameter= are how it writes calls #}"


class Weather(BaseModel):
    """The weather."""

    city: str
    degrees: float


SUNNY = 'Thinking.\n</think>\n\n{"city": "Bonn", "degrees": 21.5}'


@pytest.fixture(scope="module")
def engine():
    fake = FakeEngine(chat_template=QWEN, model_name="tiny")
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def url(engine):
    with socket.create_server(("127.0.0.1", 0)) as sock, Server(create_app(engine, ServeConfig()), sock):
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1"


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_openai_calls_tools_and_sends_their_results(client, engine):
    engine.script = TWO
    message = client.chat.completions.create(model="tiny", messages=HELLO, tools=[TOOL]).choices[0].message
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == CALLED
    assert message.model_extra["reasoning_content"] == "The user asks."
    engine.script = "Both fine.\n</think>\n\n21 degrees."
    results = [{"role": "tool", "tool_call_id": call.id, "content": "21"} for call in message.tool_calls]
    answer = client.chat.completions.create(model="tiny", messages=[*HELLO, message, *results], tools=[TOOL])
    assert answer.choices[0].message.content == "21 degrees."
    calls = TWO[TWO.index("<tool_call>") :]
    assert calls in engine.tokenizer.decode(engine.seen[-1].prompt)  # as the model wrote them


def test_openai_streams_tool_calls(client, engine):
    engine.script = TWO
    with client.chat.completions.stream(model="tiny", messages=HELLO, tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert (message.content, [json.loads(call.function.arguments) for call in message.tool_calls]) == (
        "I look.",
        CALLED,
    )


def test_openai_parses_structured_answers_and_tools(client, engine):
    engine.script = SUNNY
    parsed = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Weather)
    assert parsed.choices[0].message.parsed == Weather(city="Bonn", degrees=21.5)
    assert "degrees" in engine.seen[-1].params.constraint.source
    engine.script = XML.replace("days", "degrees")
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    parsed = client.chat.completions.parse(model="tiny", messages=HELLO, tools=tools, extra_body=off)
    assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(city="Bonn", degrees=2)


@pytest.fixture(scope="module")
def model(url):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=url, api_key="none", model="tiny", max_retries=0)


def test_langchain_calls_tools_whole_and_streamed(model, engine):
    engine.script = TWO
    bound = model.bind_tools([TOOL])
    answer = bound.invoke("How is the weather?")
    assert [call["args"] for call in answer.tool_calls] == CALLED
    total = None
    for chunk in bound.stream("How is the weather?"):
        total = chunk if total is None else total + chunk
    assert [call["args"] for call in total.tool_calls] == CALLED
    assert total.content == "I look."
    engine.script = "Good.\n</think>\n\nDone."
    history = [
        {"role": "user", "content": "?"},
        answer,
        *({"role": "tool", "tool_call_id": call["id"], "content": "21"} for call in answer.tool_calls),
    ]
    assert bound.invoke(history).content == "Done."


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_gives_structured_output(model, engine, method):
    call = XML.replace("weather", "Weather").replace("days", "degrees").replace("\n2\n", "\n21.5\n")
    engine.script = f"Hm.\n</think>\n\n{call}" if method == "function_calling" else SUNNY
    structured = model.with_structured_output(Weather, method=method)
    assert structured.invoke("How is the weather?") == Weather(city="Bonn", degrees=21.5)
    assert engine.seen[-1].params.constraint is not None


def test_litellm_calls_tools_whole_and_streamed(url, engine):
    import litellm

    engine.script = TWO
    ask = {"model": "openai/tiny", "api_base": url, "api_key": "none", "messages": HELLO, "tools": [TOOL]}
    ask["_skip_mcp_handler"] = True  # else it wants a package of MCP servers, before it sends anything
    message = litellm.completion(**ask).choices[0].message
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == CALLED
    assert (message.content, message.reasoning_content) == ("I look.", "The user asks.")
    chunks = list(litellm.completion(**ask, stream=True))
    whole = litellm.stream_chunk_builder(chunks).choices[0].message
    assert [json.loads(call.function.arguments) for call in whole.tool_calls] == CALLED
    assert whole.reasoning_content == "The user asks."
    engine.script = "Good.\n</think>\n\nDone."
    results = [{"role": "tool", "tool_call_id": call.id, "content": "21"} for call in message.tool_calls]
    again = litellm.completion(**ask | {"messages": [*HELLO, message.model_dump(), *results]})
    assert again.choices[0].message.content == "Done."
    system = {
        "role": "system",
        "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    }
    litellm.completion(**ask | {"messages": [system, *HELLO]})
    assert engine.seen[-1].boundaries.known
