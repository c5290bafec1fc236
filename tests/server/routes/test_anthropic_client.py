"""The official anthropic client against a server on a real socket."""

import pytest

from headwater.errors import QueueFull
from headwater.server.answer.anthropic import SIGNATURE
from tests.server import templates
from tests.server.answer.formats.cases import WEATHER, WRITTEN
from tests.server.fake_engine import FakeEngine
from tests.server.routes.test_serving import url  # noqa: F401  a fixture

HELLO = [{"role": "user", "content": "hello"}]
CALLS = "I look.\n\n" + "\n".join(WRITTEN["hermes"]([("weather", {"city": city})]) for city in ("Bonn", "Köln"))
TOOL = {"name": "weather", "description": "The weather of a city.", "input_schema": WEATHER}
CALLED = [{"city": "Bonn"}, {"city": "Köln"}]


@pytest.fixture(scope="module")
def anthropic():
    """The client's package, which takes two seconds to import."""
    return pytest.importorskip("anthropic", reason="it is not installed: pip install -e '.[test]'")


@pytest.fixture
def engine():
    fake = FakeEngine(chat_template=templates.HERMES)
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def client(url, anthropic):  # noqa: F811
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client, **fields):
    return client.messages.create(**{"model": "any", "messages": HELLO, "max_tokens": 400, **fields})


def test_anthropic_client_reads_a_message(client, engine):
    message = ask(client, system="Be brief.", metadata={"user_id": "u"}, extra_body={"temperature": 0.5})
    assert [(block.type, block.text) for block in message.content] == [("text", engine.script)]
    assert (message.stop_reason, message.role, message.type) == ("end_turn", "assistant", "message")
    assert message.usage.cache_creation_input_tokens == len(engine.seen[0].prompt)
    assert message.usage.output_tokens == len(engine.script.encode())
    assert message._request_id.startswith("req-")
    assert engine.seen[0].params.temperature == 0.5


def test_anthropic_client_streams_a_message(client, engine):
    with client.messages.stream(model="any", messages=HELLO, max_tokens=400) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text == engine.script
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", len(engine.script.encode()))


def test_anthropic_client_calls_tools_and_sends_results(client, engine):
    engine.script = CALLS
    with client.messages.stream(model="any", messages=HELLO, max_tokens=400, tools=[TOOL]) as stream:
        streamed = stream.get_final_message()
    message = ask(client, tools=[TOOL])
    for one in (message, streamed):
        assert [block.type for block in one.content] == ["text", "tool_use", "tool_use"]
        assert ([block.input for block in one.content[1:]], one.stop_reason) == (CALLED, "tool_use")
    results = [{"type": "tool_result", "tool_use_id": b.id, "content": "21"} for b in message.content[1:]]
    engine.script = "Both 21."
    turns = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    assert ask(client, messages=turns, tools=[TOOL]).content[0].text == "Both 21."
    prompt = engine.tokenizer.decode(engine.seen[-1].prompt)
    assert prompt.count("<tool_response>\n21") == 2


def test_anthropic_client_sends_reasoning_back(client, engine):
    engine.script = f"Hm.\n</think>\n\n{CALLS}"
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(
        model="any", messages=HELLO, max_tokens=2000, thinking=thinking, tools=[TOOL]
    ) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    assert (message.content[0].thinking, message.content[0].signature) == ("Hm.", SIGNATURE)
    results = [{"type": "tool_result", "tool_use_id": b.id, "content": "21"} for b in message.content[2:]]
    turns = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    ask(client, messages=turns, thinking=thinking, max_tokens=2000, tools=[TOOL])
    assert engine.seen[-1].prompt[: len(engine.seen[0].prompt)] == engine.seen[0].prompt


def test_anthropic_client_reads_cache_usage_and_counts_tokens(client, engine):
    system = [{"type": "text", "text": "word " * 60, "cache_control": {"type": "ephemeral"}}]
    first, second = (ask(client, system=system).usage for _ in range(2))
    assert first.cache_creation_input_tokens == len(engine.seen[0].prompt)
    assert 0 < second.cache_read_input_tokens < len(engine.seen[0].prompt), "the engine of these tests resumes at pages"
    counted = client.messages.count_tokens(model="any", messages=HELLO, system=system)
    assert counted.input_tokens == len(engine.seen[0].prompt)
    parts = second.input_tokens, second.cache_read_input_tokens, second.cache_creation_input_tokens
    assert counted.input_tokens == sum(parts)


def test_anthropic_client_parses_structured_answers(client, engine):
    engine.script = '{"city": "Bonn"}'
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    message = ask(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert message.content[0].text == engine.script
    assert "city" in engine.seen[0].params.constraint.source


def test_anthropic_beta_client_gets_an_answer(client, engine):
    message = client.beta.messages.create(model="any", messages=HELLO, max_tokens=9, betas=["interleaved-thinking"])
    assert message.stop_reason == "max_tokens"


def test_anthropic_client_lists_the_model(client, engine):
    (model,) = client.models.list()
    assert (model.id, model.display_name, model.type) == ("fake", "fake", "model")
    assert client.models.retrieve("fake").created_at.timestamp() == model.created_at.timestamp() > 0


def test_anthropic_client_raises_its_own_errors(client, engine, anthropic):
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(client, extra_body={"temperature": 3})
    assert (refused.value.type, refused.value.request_id[:4]) == ("invalid_request_error", "req-")
    engine.fail = QueueFull(100, 100, 3)
    with pytest.raises(anthropic.InternalServerError) as refused:
        ask(client)
    assert (refused.value.type, refused.value.error_code) == ("overloaded_error", "queue_full")
    engine.fail_after = 1
    with pytest.raises(anthropic.APIStatusError, match="100 requests wait"):
        list(ask(client, stream=True))
