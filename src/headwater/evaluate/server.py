"""The server under evaluation: a running one, or one that is started; and its answers to items."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import HeadwaterError
from headwater.load.answer import Json, list_of, object_of, text_of
from headwater.load.endpoint import CHAT, COMPLETIONS, CONNECT_SECONDS, Client, ServerError, about, first_model

STOP_SECONDS = 15.0  # before a server that was started is killed
LOG_LINES = 5  # last lines of the log that are quoted if it did not start
LISTENS = re.compile(r"serves .* on (http://\S+)")


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer to one item, and its cost."""

    item: int  # index in the file
    column: str  # of the results: the serving mode, and the round if a mode asks every item several times
    outcome: str  # "ok" | "refused" (a 4xx: a context that is too long, for example) | "error"
    detail: str = ""  # the error's message
    text: str = ""
    calls: tuple[Json, ...] = ()  # tool calls: {"name", "arguments" as text}
    finish_reason: str | None = None
    logprobs: tuple[object, ...] | None = None  # of the answer's tokens; None: not requested or not reported
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    reason: str | None = None  # for where the prompt resumed; Headwater's

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def visible(self) -> tuple[object, ...]:
        """The part that a client sees, to compare answers by."""
        return (self.outcome, self.text, tuple((call["name"], call["arguments"]) for call in self.calls))

    @classmethod
    def of(cls, item: int, column: str, body: Json) -> Answer:
        """Read a chat completion; fields that are missing or of the wrong type stay empty."""
        choice = object_of(next(iter(list_of(body.get("choices"))), None))
        message, usage = object_of(choice.get("message")), object_of(body.get("usage"))
        functions = [object_of(object_of(call).get("function")) for call in list_of(message.get("tool_calls"))]
        logprobs = object_of(choice.get("logprobs")).get("content")
        return cls(
            item,
            column,
            "ok" if choice else "error",
            "" if choice else "the answer has no choices",
            text=text_of(message.get("content")),
            calls=tuple({name: text_of(one.get(name)) for name in ("name", "arguments")} for one in functions),
            finish_reason=text_of(choice.get("finish_reason")) or None,
            logprobs=tuple(object_of(one).get("logprob") for one in logprobs) if isinstance(logprobs, list) else None,
            prompt_tokens=_count_of(usage.get("prompt_tokens")),
            cached_tokens=_count_of(object_of(usage.get("prompt_tokens_details")).get("cached_tokens")),
            reason=text_of(object_of(body.get("headwater")).get("reason")) or None,
        )


def _count_of(value: object) -> int | None:
    return value if isinstance(value, int) else None


class Server:
    """A running server. Its requests name the model and are greedy; threads may share it."""

    def __init__(self, url: str, api_key: str | None, model: str | None, timeout: float) -> None:
        """Connect, and read which models it serves. Raises ServerError, and ValueError for a malformed URL."""
        self.about = about(url, api_key, min(timeout, CONNECT_SECONDS))
        self.model = model or first_model(self.about)
        self._client = Client(url, api_key, timeout)
        self.url = self._client.url
        self.close = self._client.close

    def chat(self, fields: Json) -> Json:
        """Return a chat completion. Raises ServerError."""
        return self._generated(CHAT, fields)

    def complete(self, fields: Json) -> Json:
        """Return a completion. Raises ServerError."""
        return self._generated(COMPLETIONS, fields)

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text. Raises ServerError, also for fewer than 2."""
        body = object_of(self._client.post("/tokenize", {"prompt": text, "add_special_tokens": False}))
        tokens = list_of(body.get("tokens"))
        if len(tokens) < 2:
            raise ServerError(f"{self.url}/tokenize: the text has {len(tokens):,} tokens, at least 2 are needed")
        return tokens

    def answer(self, item: int, column: str, fields: Json) -> Answer:
        """Answer an item by a chat completion; an error is an outcome."""
        try:
            return Answer.of(item, column, self.chat(fields))
        except ServerError as error:
            refused = error.status is not None and 400 <= error.status < 500
            return Answer(item, column, "refused" if refused else "error", str(error))

    def _generated(self, path: str, fields: Json) -> Json:
        body = self._client.post(path, {"model": self.model, "temperature": 0, **fields})
        if not isinstance(body, dict):
            raise ServerError(f"{self.url}{path}: the answer is {str(body)[:80]!r}, must be an object")
        return body


@contextmanager
def own_server(model: Path | None, memory: str, weights: str = "auto") -> Iterator[str]:
    """Start `headwater serve` on a free port and give its URL; stop it at the end.

    Raises HeadwaterError if it ends before it listens.
    """
    command = [sys.executable, "-m", "headwater", "serve", *([str(model)] if model else [])]
    command += ["--host", "127.0.0.1", "--port", "0", "--memory", memory, "--weights", weights]
    command += ["--healing", "off"]  # or a prompt composed for one item could be exact for the next
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            found = (LISTENS.search(line) for line in process.stdout)
            listens = next((match for match in found if match), None)
            if listens is None:
                log.seek(0)
                last = "; ".join(log.read().strip().splitlines()[-LOG_LINES:])
                raise HeadwaterError(f"the server ended with exit code {process.wait()}: {last}")
            yield listens[1]
        finally:
            process.terminate()
            try:
                process.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
