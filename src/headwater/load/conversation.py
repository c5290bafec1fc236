"""A chat with a server, turn by turn: what was said so far, and the next answer as it comes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from headwater.load.answer import Answer, Piece
from headwater.load.endpoint import CHAT, base_url, first_model, headers, refusal_text, streamed
from headwater.load.session import Message

CONNECT = 10.0  # seconds


class ServerError(Exception):
    """The server refused, failed, or could not be reached; the conversation is as it was before the turn."""


class Conversation:
    """Sends the whole history each time, as it was sent and answered, so that a server's cache can know it."""

    def __init__(
        self, url: str, api_key: str | None = None, model: str | None = None, system: str = "", max_tokens: int = 1024
    ) -> None:
        """Raises ValueError for what is no URL; the server is first spoken to when it is needed."""
        timeout = httpx.Timeout(None, connect=CONNECT)
        self._client = httpx.Client(base_url=base_url(url), headers=headers(api_key), timeout=timeout, trust_env=False)
        self._model, self._max_tokens = model, max_tokens
        self.system = system
        self.messages: list[Message] = []  # without the system's
        self._asked: str | None = None  # the last question, also where it got no answer
        self.answer = Answer()  # the last one
        self.started = 0.0  # when its request was sent

    def close(self) -> None:
        self._client.close()

    def say(self, text: str) -> Iterator[Piece]:
        """Send a message; yields the answer's pieces. Ended early, by `close()` of the generator, it keeps what came.

        Raises ServerError.
        """
        self._asked = text
        self.messages.append({"role": "user", "content": text})
        try:
            yield from self._stream()
        except httpx.HTTPError as error:
            self._forget()
            raise ServerError(f"{self._client.base_url}: {error}") from error
        except ServerError:
            self._forget()
            raise
        finally:
            if self.messages and self.messages[-1]["role"] == "user":
                self._keep()

    def retry(self) -> str:
        """Forget the last question and its answer, if it got one; returns the question.

        Raises ServerError if nothing was asked.
        """
        if self._asked is None:
            raise ServerError("nothing was asked yet")
        if self.answer.text:
            del self.messages[-2:]
        return self._asked

    def restart(self) -> None:
        """Forget all but the system's text."""
        self.messages.clear()
        self.answer, self._asked = Answer(), None

    def get(self, path: str) -> Any:
        """A page of the server's as JSON; raises ServerError."""
        try:
            response = self._client.get(path, timeout=CONNECT)
            if not response.is_success:
                raise ServerError(f"{path}: {refusal_text(response.content, response.status_code)}")
            return response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ServerError(f"{self._client.base_url}{path}: {error}") from error

    def save(self, path: Path) -> None:
        """One line that `headwater bench serve` takes as a recorded session."""
        messages = self._sent()
        calls = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        path.write_text(json.dumps({"session": path.stem, "messages": messages, "calls": calls}) + "\n")

    @property
    def ttft(self) -> float | None:
        """Seconds to the last answer's first token."""
        return None if self.answer.first is None else self.answer.first - self.started

    def _sent(self) -> list[Message]:
        return [{"role": "system", "content": self.system}, *self.messages] if self.system else list(self.messages)

    def _stream(self) -> Iterator[Piece]:
        if self._model is None:
            self._model = first_model({"/v1/models": self.get("/v1/models")})
        body = streamed(self._model, {"messages": self._sent(), "max_tokens": self._max_tokens})
        answer = self.answer = Answer()
        self.started = time.perf_counter()
        with self._client.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200:
                raise ServerError(refusal_text(response.read(), response.status_code))
            for chunk in response.iter_bytes():
                yield from answer.feed(chunk, time.perf_counter())
        if answer.fault is not None:
            raise ServerError(answer.fault)

    def _keep(self) -> None:
        """What came of the answer stays; where nothing came, the question goes too."""
        if self.answer.text:
            self.messages.append({"role": "assistant", "content": self.answer.text})
        else:
            self.messages.pop()

    def _forget(self) -> None:
        self.messages.pop()
        self.answer = Answer()
