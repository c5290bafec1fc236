"""The API on a real socket, with the official client: whole answers, streams, and clients that leave."""

import json
import socket
import threading

import httpx
import openai
import pytest
import uvicorn

from headwater.config import ServeConfig
from headwater.server.app import create_app

HELLO = [{"role": "user", "content": "hello"}]
PATIENCE = 20  # seconds after which something that must happen has not


class Server(uvicorn.Server):
    """Server with an event that is set when it listens."""

    def __init__(self, app, sock):
        super().__init__(uvicorn.Config(app, log_level="warning"))
        self.listening = threading.Event()
        self._thread = threading.Thread(target=self.run, args=([sock],), daemon=True)

    async def startup(self, sockets=None):
        await super().startup(sockets)
        self.listening.set()

    def __enter__(self):
        self._thread.start()
        assert self.listening.wait(PATIENCE)
        return self

    def __exit__(self, *error):
        self.should_exit = True
        self._thread.join()


@pytest.fixture
def url(engine):
    with socket.create_server(("127.0.0.1", 0)) as sock, Server(create_app(engine, ServeConfig()), sock):
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_official_client_chats(client, engine):
    answer = client.chat.completions.create(
        model="whatever", messages=HELLO, max_tokens=50, extra_body={"cache_salt": "me", "top_k": 3}
    )
    assert answer.choices[0].message.content == engine.script
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.model_extra["headwater"]["reason"] == "too_short"
    assert (engine.seen[0].namespace, engine.seen[0].params.top_k) == ("me", 3)


def test_official_client_streams(client, engine):
    stream = client.chat.completions.create(
        model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=1
    )
    parts = list(stream)
    text = "".join(choice.delta.content for part in parts for choice in part.choices)
    assert text == engine.script
    assert parts[-1].usage.completion_tokens == len(engine.script.encode())
    assert parts[-1].model_extra["headwater"]["resumed_at"] == 0
    assert parts[0].choices[0].logprobs.content[0].token == "G"


def test_official_client_completes_and_lists_models(client, engine):
    assert client.completions.create(model="m", prompt=[1, 2], max_tokens=50).choices[0].text == engine.script
    assert [model.id for model in client.models.list()] == ["fake"]


def test_official_client_understands_errors(client):
    with pytest.raises(openai.BadRequestError, match=r"4,500.*4,096") as caught:
        client.completions.create(model="m", prompt="x" * 4500)
    assert caught.value.code == "context_length_exceeded"


def test_openai_client_raises_the_error_that_ends_a_stream(client, engine):
    engine.fail, engine.fail_after = RuntimeError("midway"), 2
    with pytest.raises(openai.APIError, match="internal error"):
        list(client.chat.completions.create(model="m", messages=HELLO, stream=True))


@pytest.mark.parametrize("hold_after", [0, 3])
def test_client_that_leaves_a_stream_cancels_its_request(url, engine, hold_after):
    engine.hold_after = hold_after
    body = json.dumps({"messages": HELLO, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), PATIENCE) as client:
        client.sendall(head + body)
        assert engine.held.wait(PATIENCE)
    assert engine.was_cancelled.wait(PATIENCE)
    assert engine.cancelled == [0]


def test_client_that_leaves_before_its_answer_cancels_its_request(url, engine):
    engine.hold_after = 2
    address = httpx.URL(url)
    payload = b'{"prompt": ["abc", "abd"]}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(head + payload)
        assert engine.held.wait(PATIENCE)
    assert engine.was_cancelled.wait(PATIENCE)
    assert client_answers(url)
    assert sorted(engine.cancelled) == [0, 1]


def client_answers(url):
    """Assert that the server still answers, so that it has handled the disconnected clients."""
    return httpx.get(f"{url}/health").status_code == 200


def test_request_that_ended_is_not_cancelled(client, engine, url):
    client.completions.create(model="m", prompt="abc")
    list(client.completions.create(model="m", prompt="abc", stream=True))
    assert client_answers(url)
    assert engine.cancelled == []
