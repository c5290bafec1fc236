"""The official ollama client against a server on a real socket."""

import pytest

from headwater.errors import QueueFull
from tests.server import templates
from tests.server.answer.formats.cases import WRITTEN
from tests.server.fake_engine import FakeEngine
from tests.server.routes.test_serving import url  # noqa: F401  a fixture

ollama = pytest.importorskip("ollama", reason="the ollama client is not installed: pip install -e '.[test]'")

HELLO = [{"role": "user", "content": "hello"}]
CALLS = "I look.\n\n" + "\n".join(WRITTEN["hermes"]([("weather", {"city": city})]) for city in ("Bonn", "Köln"))


def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: name of the city
    """
    return f"rain in {city}"


@pytest.fixture
def engine():
    fake = FakeEngine(chat_template=templates.HERMES)
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def client(url):  # noqa: F811
    return ollama.Client(url)


def test_ollama_client_reads_a_chat_and_a_stream(client, engine):
    options = {"temperature": 0.5, "num_ctx": 4096, "seed": 1}
    whole = client.chat("any", HELLO, options=options, think=False, keep_alive="5m")
    pieces = list(client.chat("any", HELLO, options=options, think=False, stream=True))
    assert whole.message.content == "".join(piece.message.content for piece in pieces) == engine.script
    for end in (whole, pieces[-1]):
        assert (end.done, end.done_reason, end.model) == (True, "stop", "fake")
        assert end.eval_count == len(engine.script.encode())
        assert end.prompt_eval_count == len(engine.seen[0].prompt)
        assert end.total_duration >= end.eval_duration > 0
    assert not any(piece.done for piece in pieces[:-1])
    assert engine.seen[0].params.temperature == 0.5


def test_ollama_client_generates(client, engine):
    assert client.generate("any", "hello", think=False).response == engine.script
    pieces = client.generate("any", "hello", raw=True, stream=True, options=ollama.Options(num_predict=6))
    assert "".join(piece.response for piece in pieces) == "Grüß"
    assert client.generate("any").done_reason == "load"
    assert client.generate("any", keep_alive=0).done_reason == "load"


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_client_calls_functions_and_sends_results(client, engine, stream):
    engine.script = f"Hm.\n</think>\n\n{CALLS}"
    answer = client.chat("any", HELLO, tools=[weather], think=True, stream=stream)
    messages = [piece.message for piece in answer] if stream else [answer.message]
    assert "".join(message.thinking or "" for message in messages) == "Hm."
    calls = [call for message in messages for call in message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [{"city": "Bonn"}, {"city": "Köln"}]
    results = [
        {"role": "tool", "tool_name": c.function.name, "content": weather(**c.function.arguments)} for c in calls
    ]
    engine.script = "</think>\n\nRain in both."
    last = client.chat("any", [*HELLO, *messages, *results], tools=[weather])
    assert last.message.content == "Rain in both."
    prompt = engine.tokenizer.decode(engine.seen[-1].prompt)
    assert prompt.count("<tool_response>\nrain in ") == 2


def test_ollama_client_parses_structured_answers(client, engine):
    engine.script = '</think>\n\n{"city": "Bonn"}'
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    answer = client.chat("any", HELLO, format=schema)
    assert answer.message.content == '{"city": "Bonn"}'
    assert "city" in engine.seen[0].params.constraint.source


def test_ollama_client_reads_log_probabilities(client, engine):
    answer = client.chat("any", HELLO, logprobs=True, top_logprobs=2, think=False)
    assert len(answer.logprobs) == len(engine.script.encode())
    assert len(answer.logprobs[0].top_logprobs) == 2


def test_ollama_client_lists_and_shows_the_model(client, engine):
    (listed,) = client.list().models
    (running,) = client.ps().models
    shown = client.show(listed.model)
    assert (listed.model, listed.digest, running.context_length) == ("fake", running.digest, 4096)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo[f"{shown.details.family}.context_length"] == 4096
    assert shown.modified_at == listed.modified_at


def test_ollama_client_raises_its_own_error(client, engine):
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature") as refused:
        client.chat("any", HELLO, options={"temperature": 3})
    assert refused.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="embeddings"):
        client.embed("any", "text")
    with pytest.raises(ollama.ResponseError, match="headwater serve MODEL"):
        client.pull("llama")
    engine.fail = QueueFull(100, 100, 3)
    with pytest.raises(ollama.ResponseError, match="100 requests wait") as refused:
        client.chat("any", HELLO)
    assert refused.value.status_code == 503
    engine.fail_after = 1
    with pytest.raises(ollama.ResponseError, match="100 requests wait"):
        list(client.chat("any", HELLO, stream=True))
