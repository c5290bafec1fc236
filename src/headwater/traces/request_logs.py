"""Logs of an OpenAI-style API, a request a line: `messages` or `prompt`, and the answer where it was logged.

The request may be the line itself, or in its `body` (OpenAI's batches) or `request`; the answer is in `response` or
`completion`: text, a message, or the API's own answer. Lines of one `session` (`session_id`, `conversation_id`) go on
from each other; others are requests of their own. `cache_salt` is the namespace. Segments are marked as for the server,
by its usual separator, in parts or as `documents`; `exact` and `fidelity` are read, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headwater.request import Boundaries
from headwater.traces.chat import Chat, text_of
from headwater.traces.reader import Reader, has, seconds
from headwater.traces.request import TOKEN_BYTES, Request
from headwater.traces.segments import documents_of, encoded, fidelity_of, pieces_of_prompt
from headwater.traces.shared_text import Prompt, SharedTexts
from headwater.traces.source import Source
from headwater.traces.tokens import Remembered, Tokens

PLACES = ("body", "request")
ANSWERS = ("response", "completion")
SESSIONS = ("session", "session_id", "conversation_id")


class RequestLogs(Reader):
    """Reader of request logs; generated tokens are known if the answer was logged, else at most their number."""

    interleaved = True

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(Remembered(tokens))
        self._unknown = 0

    @staticmethod
    def matches(first: Any) -> bool:
        return isinstance(first, dict) and ("messages" in _asked(first) or isinstance(_asked(first).get("prompt"), str))

    def requests(self, source: Source) -> Iterator[Request]:
        texts = SharedTexts()
        for number, line in enumerate(source.records(), 1):
            asked = _asked(line)
            session = next((str(line[name]) for name in SESSIONS if line.get(name) is not None), f"line {number}")
            output, length = self._answer(line, asked)
            prompt = self._prompt(asked, str(asked.get("cache_salt") or ""))
            texts.add(session, prompt, output, seconds(line), length)
        yield from texts.requests()

    def notes(self) -> tuple[str, ...]:
        return (f"{self._unknown:,} requests without their answer: it is not cached",) if self._unknown else ()

    def _prompt(self, asked: Mapping[str, Any], namespace: str) -> Prompt:
        if "messages" in asked:
            chat = _chat(self._tokens, asked)
            text, boundaries = chat.asked()
            segments = () if asked.get("exact") else chat.segments(len(text) // TOKEN_BYTES)
            return Prompt(text, boundaries, namespace, chat.beginning(), segments, fidelity_of(asked))
        prompt = asked["prompt"]
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"prompt is {str(prompt)[:40]!r}, must be a text of 1 character or more")
        ids, segments = encoded(self._tokens, pieces_of_prompt(prompt))
        text = ids.tobytes()
        parts = () if asked.get("exact") else segments, fidelity_of(asked)
        return Prompt(text, Boundaries(), namespace, text[: 64 * TOKEN_BYTES], *parts)

    def _answer(self, line: Mapping[str, Any], asked: Mapping[str, Any]) -> tuple[bytes, int]:
        """Return the known generated tokens, and the number of all generated tokens."""
        answer = next((line[name] for name in ANSWERS if line.get(name) is not None), None)
        if isinstance(answer, dict) and isinstance(answer.get("body"), dict):
            answer = answer["body"]
        usage = answer.get("usage") if isinstance(answer, dict) else line.get("usage")
        length = int((usage or {}).get("completion_tokens") or 0)
        text = _text(answer)
        if text is None:
            self._unknown += 1
            return b"", length
        ids = self._tokens.of(text)
        if "messages" in asked:
            ids = ids + self._tokens.footer()[:1]
        return ids.tobytes(), len(ids)


def _chat(tokens: Tokens, asked: Mapping[str, Any]) -> Chat:
    """Return the conversation, with documents in front of the user's last message."""
    chat, messages, documents = Chat(tokens), asked["messages"], documents_of(asked)
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    for i, message in enumerate(messages):
        chat.say(message, documents if i == last else ())
    return chat


def _asked(line: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((line[name] for name in PLACES if isinstance(line.get(name), dict)), line)


def _text(answer: Any) -> str | None:
    """Return the text of a string, a message, or an answer with choices; None if it is unknown."""
    if answer is None or isinstance(answer, str):
        return answer
    if has(answer, "choices") and answer["choices"]:
        first = answer["choices"][0]
        return text_of(first["message"]) if "message" in first else str(first["text"])
    return text_of(answer) if has(answer, "content") else None
