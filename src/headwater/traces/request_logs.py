"""Logs of requests, one a line: of an OpenAI-style API, or as token ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from headwater.request import Boundaries
from headwater.traces.chat import Chat, documents_of, encoded, fidelity_of, pieces_of_prompt, spans_of, text_of
from headwater.traces.reader import Reader, has, seconds
from headwater.traces.request import TOKEN_BYTES, Request, Usage
from headwater.traces.source import Source
from headwater.traces.tokens import Remembered, Tokens
from headwater.traces.usage import part_text, usage_of

PLACES = ("body", "request")
ANSWERS = ("response", "completion")
SESSIONS = ("session", "session_id", "conversation_id")
INPUTS = ("input", "input_tokens", "prompt_token_ids", "prompt")
OUTPUTS = ("output", "output_tokens")


@dataclass(slots=True)
class _Text:
    longest: bytes


class SharedTexts:
    """Requests of token ids whose sessions may be interleaved.

    A session's text is kept only once, while each prompt extends the prompt and answer before it.
    """

    def __init__(self) -> None:
        self._asked: list[tuple[Request, _Text]] = []
        self._texts: dict[str | bytes, _Text] = {}  # by conversation: the text of its last request

    def add(self, prompt: Request, output: bytes, output_tokens: int = 0, beginning: bytes | None = None) -> None:
        """Add an answer to a request without one.

        output_tokens: the number of generated tokens if `output` does not have all of them. beginning: identifies the
        conversation if the log has no sessions.
        """
        conversation = prompt.session if beginning is None else beginning
        text = self._texts.get(conversation)
        if text is None or not prompt.text.startswith(text.longest):
            text = self._texts[conversation] = _Text(b"")
        text.longest = prompt.text + output
        n_output = len(output) // TOKEN_BYTES
        known, generated = prompt.prompt_tokens + n_output, max(n_output, output_tokens)
        # the prompt's own text is not kept: it is a prefix of the longest one
        self._asked.append((replace(prompt, text=b"", output_tokens=generated, known_tokens=known), text))

    def requests(self) -> Iterator[Request]:
        """Yield the requests in the order of `add`; called when all have been added."""
        return (replace(request, text=text.longest) for request, text in self._asked)


class TokenLists(Reader):
    """Token ids: {"t", "session", "input": [ids], "output": [ids], "segments": [[start, end], ...]}.

    All but the input may be missing; `fidelity` and `exact` are as in the server's API. A line may also be a list
    of the input's ids. Other names: `prompt_token_ids` and `prompt`; and those of Marconi's published traces, which
    SegLen's have, too: `ts`, `session_id`, `input_tokens`, `output_tokens`.
    """

    about = "ids of prompts and answers, also Marconi's, SegLen's"
    fields = ("t", "ts", "session", *INPUTS, *OUTPUTS, "segments")
    interleaved = True

    @staticmethod
    def matches(first: Any) -> bool:
        if isinstance(first, list):
            return all(isinstance(token, int) for token in first)
        return any(has(first, name) and isinstance(first[name], list) for name in INPUTS)

    def requests(self, source: Source) -> Iterator[Request]:
        texts = SharedTexts()
        for number, line in enumerate(source.records()):
            record = {"input": line} if isinstance(line, list) else line
            prompt = array("i", record[next((name for name in INPUTS if name in record), INPUTS[0])])
            if not prompt:
                raise ValueError("input has 0 tokens, at least 1 is needed")
            output = array("i", next((record[name] for name in OUTPUTS if record.get(name)), ()))
            session = next((str(record[name]) for name in SESSIONS if name in record), f"line {number}")
            spans, fidelity = spans_of(record, len(prompt)), fidelity_of(record)
            known = session, prompt.tobytes(), len(prompt), 0, len(prompt), seconds(record)
            texts.add(Request(*known, segments=spans, fidelity=fidelity), output.tobytes())
        yield from texts.requests()


@dataclass(frozen=True, slots=True)
class Logged:
    """One request of a log, and what the log has of its answer."""

    asked: Mapping[str, Any]  # as sent to an OpenAI-style API
    answer: Any = None  # text, a message, or the API's own answer; None: not logged
    session: str | None = None
    at: float | None = None
    usage: Usage | None = None
    think: float | None = None  # seconds after the session's answer before


class RequestLogs(Reader):
    """Requests to an OpenAI-style API: `messages`, `prompt` or `input`, and the answer if it was logged.

    The request may be the line itself, or in its `body` (OpenAI's batches) or `request`; the answer is in `response`
    or `completion`, or in `output` next to an `input`: text, a message, or the API's own answer. Without it, at most
    the number of generated tokens is known. Lines of one `session` (`session_id`, `conversation_id`) continue each
    other; others are independent requests. `cache_salt` is the namespace. Segments are marked as for the server, by
    its usual separator, in parts or as `documents`; `exact` and `fidelity` are read, too. Inputs of vLLM's benchmark
    (`prompt`, `output_tokens`) have the length of the answer.
    """

    about = "of an OpenAI-style API: messages or prompt, response"
    fields: ClassVar[tuple[str, ...]] = ("messages", "prompt", *PLACES, *ANSWERS, *SESSIONS, "timestamp")
    interleaved = True

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(Remembered(tokens))
        self._unknown = 0

    @staticmethod
    def matches(first: Any) -> bool:
        if not isinstance(first, dict):
            return False
        asked = _asked(first)
        texts = [asked.get("prompt"), asked.get("input") if "output" in asked else None]
        return "messages" in asked or any(isinstance(text, str) for text in texts)

    def requests(self, source: Source) -> Iterator[Request]:
        texts = SharedTexts()
        for number, line in enumerate(source.records(), 1):
            for turn, one in enumerate(self.logged(line)):
                session = f"line {number}" + (f"/{turn}" if turn else "") if one.session is None else one.session
                prompt, beginning = self._prompt(one, session)
                texts.add(prompt, *self._answer(one), beginning)
        yield from texts.requests()

    def logged(self, line: Any) -> Iterable[Logged]:
        """Return the requests of a line. Raises KeyError or ValueError if it has none."""
        asked = _asked(line)
        answer = next((line[name] for name in ANSWERS if line.get(name) is not None), None)
        if isinstance(asked.get("input"), str) and "output" in asked:
            asked, answer = {"prompt": asked["input"]}, asked["output"]
        output = line.get("output_tokens")
        usage = line.get("usage") or ({"completion_tokens": output} if output else None)
        session = next((str(line[name]) for name in SESSIONS if line.get(name) is not None), None)
        yield Logged(asked, answer, session, seconds(line), usage_of(usage))

    def notes(self) -> tuple[str, ...]:
        return (f"{self._unknown:,} requests without their answer: it is not cached",) if self._unknown else ()

    def _prompt(self, one: Logged, session: str) -> tuple[Request, bytes]:
        """Return the request without its answer, and the tokens that identify the conversation."""
        asked = one.asked
        if "messages" in asked:
            chat = _chat(self._tokens, asked)
            text, boundaries = chat.asked()
            segments, beginning = chat.segments(len(text) // TOKEN_BYTES), chat.beginning()
        else:
            prompt = asked["prompt"]
            if not isinstance(prompt, str) or not prompt:
                raise ValueError(f"prompt is {str(prompt)[:40]!r}, must be a text of 1 character or more")
            ids, segments = encoded(self._tokens, pieces_of_prompt(prompt))
            text, boundaries = ids.tobytes(), Boundaries()
            beginning = text[: 64 * TOKEN_BYTES]
        namespace, length = str(asked.get("cache_salt") or ""), len(text) // TOKEN_BYTES
        parts = boundaries, namespace, () if asked.get("exact") else segments, fidelity_of(asked)
        usage = one.usage or usage_of(_unwrapped(one.answer).get("usage"))
        request = Request(session, text, length, 0, length, one.at, one.think, *parts)
        return replace(request, usage=usage if usage and usage.prompt_tokens else None), beginning

    def _answer(self, one: Logged) -> tuple[bytes, int]:
        """Return the known generated tokens, and the number of all generated tokens."""
        answer = one.answer
        usage = usage_of(_unwrapped(answer).get("usage")) or one.usage
        text = _text(_unwrapped(answer) or answer)
        if text is None:
            self._unknown += 1
            return b"", usage.output_tokens if usage else 0
        ids = self._tokens.of(text)
        if "messages" in one.asked:
            ids = ids + self._tokens.footer()[:1]
        return ids.tobytes(), len(ids)


def messages_of(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a request of the responses API with `messages`; others as they are."""
    if "messages" in asked or "input" not in asked:
        return asked
    items = asked["input"]
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    system = [{"role": "system", "content": asked["instructions"]}] if asked.get("instructions") else []
    return {"messages": [*system, *({"role": _role(item), "content": part_text(item)} for item in items)]}


def _role(item: Mapping[str, Any]) -> str:
    return str(item.get("role") or ("assistant" if "call_id" in item and "output" not in item else "tool"))


def _chat(tokens: Tokens, asked: Mapping[str, Any]) -> Chat:
    """Return the conversation, with documents in front of the user's last message."""
    chat, messages, documents = Chat(tokens), asked["messages"], documents_of(asked)
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    for i, message in enumerate(messages):
        chat.say(message, documents if i == last else ())
    return chat


def _asked(line: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((line[name] for name in PLACES if isinstance(line.get(name), dict)), line)


def _unwrapped(answer: Any) -> Mapping[str, Any]:
    """Return an answer that is an object, out of its `body`; {} for others."""
    if isinstance(answer, dict) and isinstance(answer.get("body"), dict):
        return dict(answer["body"])
    return answer if isinstance(answer, dict) else {}


def _text(answer: Any) -> str | None:
    """Return the text of a string, a message, or an answer with choices; None if it is unknown."""
    if answer is None or isinstance(answer, str):
        return answer
    if has(answer, "choices") and answer["choices"]:
        first = answer["choices"][0]
        return text_of(first["message"]) if "message" in first else str(first["text"])
    return text_of(answer) if has(answer, "content") else None
