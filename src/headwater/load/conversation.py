"""A chat with a server, turn by turn, whose answers are streamed."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx

from headwater.load.answer import Answer, Piece
from headwater.load.endpoint import CHAT, Client, ServerError, first_model, refusal_text, streamed
from headwater.load.session import Message


class Conversation:
    """A chat that sends its whole history unchanged at each turn, so that the server's cache matches it."""

    def __init__(
        self, url: str, api_key: str | None = None, model: str | None = None, system: str = "", max_tokens: int = 1024
    ) -> None:
        """Raises ValueError for a malformed URL. The first turn connects."""
        self._client = Client(url, api_key, None)
        self.get, self.close = self._client.get, self._client.close
        self._model, self._max_tokens = model, max_tokens
        self.system = system
        self.messages: list[Message] = []  # without the system prompt
        self._asked: str | None = None  # the last question, even if it got no answer
        self.answer = Answer()  # to the last question
        self.started = 0.0  # time at which that was sent

    def say(self, text: str) -> Generator[Piece, None, None]:
        """Send a message; yields the prompt's progress and the answer's pieces. `close()` keeps the pieces so far.

        Raises ServerError; the conversation is then as it was before the turn.
        """
        self._asked = text
        self.messages.append({"role": "user", "content": text})
        try:
            yield from self._stream()
        except httpx.HTTPError as error:
            self._forget()
            raise ServerError(f"{self._client.url}: {error}") from error
        except ServerError:
            self._forget()
            raise
        finally:
            if self.messages and self.messages[-1]["role"] == "user":
                self._keep()

    def retry(self) -> str:
        """Remove the last question and its answer, and return the question. Raises ServerError if there is none."""
        if self._asked is None:
            raise ServerError("nothing was asked yet")
        if self.answer.text:
            del self.messages[-2:]
        return self._asked

    def restart(self) -> None:
        """Remove all messages; the system prompt stays."""
        self.messages.clear()
        self.answer, self._asked = Answer(), None

    def save(self, path: Path) -> None:
        """Write the chat as a recorded session that `headwater bench serve` can send."""
        messages = self._sent()
        calls = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        path.write_text(json.dumps({"session": path.stem, "messages": messages, "calls": calls}) + "\n")

    @property
    def ttft(self) -> float | None:
        """Seconds from the last question to its answer's first token."""
        return None if self.answer.first is None else self.answer.first - self.started

    def _sent(self) -> list[Message]:
        return [{"role": "system", "content": self.system}, *self.messages] if self.system else list(self.messages)

    def _stream(self) -> Iterator[Piece]:
        if self._model is None:
            self._model = first_model({"/v1/models": self.get("/v1/models")})
        body = streamed(self._model, {"messages": self._sent(), "max_tokens": self._max_tokens})
        body["stream_options"]["include_progress"] = True
        answer = self.answer = Answer()
        self.started = time.perf_counter()
        with self._client.http.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200:
                raise ServerError(refusal_text(response.read(), response.status_code))
            for chunk in response.iter_bytes():
                yield from answer.feed(chunk, time.perf_counter())
        if answer.fault is not None:
            raise ServerError(answer.fault)

    def _keep(self) -> None:
        """Keep the pieces of the answer; without any, remove the question."""
        if self.answer.text:
            self.messages.append({"role": "assistant", "content": self.answer.text})
        else:
            self.messages.pop()

    def _forget(self) -> None:
        self.messages.pop()
        self.answer = Answer()
