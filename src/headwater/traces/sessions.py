"""Recorded sessions with their messages: agents with calls and times, chats, and agents that collapse observations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from headwater.errors import ConfigError
from headwater.traces.chat import Chat, Message, text_of
from headwater.traces.reader import Reader, calls_of, finite, has
from headwater.traces.request import Request, Trace, Usage
from headwater.traces.source import MALFORMED, Source, find
from headwater.traces.tokens import Remembered, Tokens

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
ROLES |= {"bard": "assistant", "assistant": "assistant", "system": "system", "tool": "tool"}
OBSERVERS = ("user", "tool")  # roles of messages that hold observations


class Sessions(Reader):
    """Sessions, one a line. A session's requests share one text.

    `messages` and `calls` [n, ...]: call i has messages[:n_i] as its prompt and messages[n_i] as its answer, `t`[i]
    seconds after `t0`. `branches` [{`at`, `messages`, `reply`}] are requests that fork off messages[:at]. Without
    `calls`, messages that end with the assistant's are a chat: each assistant's message answers those before it.
    `usage`[i] has the prompt's tokens, the answer's, and those of the prompt that were cached, as reported.
    """

    about = "agents and chats: messages, with calls, times, usage"
    fields = ("session", "messages", "calls", "t0", "t", "usage", "branches")

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(tokens)
        self._prompt_tokens = self._logged_tokens = 0

    @staticmethod
    def matches(first: Any) -> bool:
        if not has(first, "messages") or has(first, "response"):
            return False
        return "calls" in first or (bool(first["messages"]) and first["messages"][-1].get("role") == "assistant")

    def requests(self, source: Source) -> Iterator[Request]:
        for number, line in enumerate(source.records(), 1):
            messages, name = line["messages"], str(line.get("session", number))
            calls = calls_of(line) if "calls" in line else _replies(messages)
            chat = Chat(self._tokens, messages)
            text, times, usage = chat.text(), self._times(line, len(calls)), line.get("usage") or ()
            for turn, reply in enumerate(calls):
                request = chat.request(name, text, reply, times[turn])
                if turn < len(usage):
                    prompt, output, *cached = usage[turn]
                    self._prompt_tokens += request.prompt_tokens
                    self._logged_tokens += prompt
                    request = replace(request, usage=Usage(prompt, cached[0] if cached else None, output))
                yield request
            for branch, fork in enumerate(line.get("branches") or ()):
                yield self._fork(f"{name}/{branch}", messages, fork)

    def notes(self) -> tuple[str, ...]:
        if not self._logged_tokens:
            return ()
        ratio = self._prompt_tokens / self._logged_tokens
        logged = f"{self._prompt_tokens:,} prompt tokens, {ratio:.3f} of the {self._logged_tokens:,} that were logged"
        return (logged,)

    def _times(self, line: dict[str, Any], count: int) -> list[float | None]:
        times = line.get("t")
        if not times:
            return [None] * count
        if len(times) != count:
            raise ValueError(f"t has {len(times):,} times, calls has {count:,}")
        start = finite(line.get("t0") or 0, "t0")
        return [start + finite(t, "t") for t in times]

    def _fork(self, name: str, messages: list[Any], fork: dict[str, Any]) -> Request:
        prompt = [*messages[: fork["at"]], *fork["messages"]]
        chat = Chat(self._tokens, [*prompt, {"role": "assistant", "content": fork["reply"]}])
        return chat.request(name, chat.text(), len(prompt))


class ShareGpt(Reader):
    """ShareGPT's JSON: an array of {"id", "conversations": [{"from": "human" | "gpt" | "system", "value"}]}.

    Turns may also have `role` and `content`. Each answer that follows another message is a request's. Turns with an
    unknown role are left out, as are conversations without an answer, and both are counted.
    """

    about = "conversations with from/value or role/content"
    fields: ClassVar[tuple[str, ...]] = ("id", "conversations")
    turns = "conversations"  # field with the turns

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(tokens)
        self._unanswered = 0
        self._unknown: Counter[str] = Counter()

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "conversations")

    def requests(self, source: Source) -> Iterator[Request]:
        for number, record in enumerate(source.records(), 1):
            messages = list(self._known(record[self.turns]))
            replies = _replies(messages)
            if not replies:
                self._unanswered += 1
                continue
            chat = Chat(self._tokens, messages)
            text, name = chat.text(), f"{record.get('id', '')} {number}".strip()  # ids are not unique in these files
            for reply in replies:
                yield chat.request(name, text, reply)

    def notes(self) -> tuple[str, ...]:
        left = [f"{self._unanswered:,} conversations without an answer are left out"] if self._unanswered else []
        roles = ", ".join(sorted(self._unknown))
        turns = [f"{self._unknown.total():,} turns of unknown roles are left out: {roles}"] if self._unknown else []
        return (*left, *turns)

    def _known(self, turns: Sequence[dict[str, Any]]) -> Iterator[Message]:
        for turn in turns:
            name, content = (turn["role"], turn["content"]) if "role" in turn else (turn["from"], turn["value"])
            if name in ROLES:
                yield {"role": ROLES[name], "content": content}
            else:
                self._unknown[str(name)] += 1


def _replies(messages: list[Any]) -> list[int]:
    return [number for number, message in enumerate(messages) if number and message["role"] == "assistant"]


@dataclass(frozen=True, slots=True)
class Collapsed:
    """Sessions of `file` (`messages` and `calls`) whose prompts have only the `last` observations in full.

    A line that says how many lines are left out takes the place of an older one, as in SWE-agent's history processor
    `last_n_observations` (Yang et al. 2024), which keeps 5. The first message of a user is the task and stays.
    `turns`: requests of a session from its beginning; 0: all. `share`: of the sessions, those that collapse, evenly
    spread over the file; the others keep their histories.
    """

    file: str
    last: int = 5
    turns: int = 0
    share: float = 1.0

    def trace(self, name: str, tokens: Tokens, data: Path | None = None, seed: int = 0) -> Trace:
        """Read the trace; nothing is drawn. Raises ConfigError for options, TraceError for a malformed file."""
        if self.last < 1 or self.turns < 0:
            raise ConfigError(f"last is {self.last}, must be at least 1; turns are {self.turns}, must be at least 0")
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share is {self.share}, must be from 0 to 1")
        source, remembered = Source(find(Path(self.file), data)), Remembered(tokens)
        try:
            lines = enumerate(source.records())
            requests = tuple(one for number, line in lines for one in self._requests(number, line, remembered))
        except MALFORMED as error:
            raise source.malformed(error) from error
        note = f"prompts have the last {self.last} observations in full"
        return Trace(name, requests, notes=(note if self.share == 1 else f"{self.share:.0%} of sessions' {note}",))

    def _requests(self, number: int, line: dict[str, Any], tokens: Tokens) -> Iterator[Request]:
        collapses = int((number + 1) * self.share) > int(number * self.share)
        messages, times, start = line["messages"], line.get("t") or (), finite(line.get("t0") or 0, "t0")
        for turn, reply in enumerate(calls_of(line)[: self.turns or None]):
            chat = Chat(tokens)
            history = messages[:reply]
            for message in collapsed(history, self.last) if collapses else history:
                chat.add(str(message["role"]), tokens.of(text_of(message)))
            chat.add("assistant", tokens.of(text_of(messages[reply])))
            at = start + finite(times[turn], "t") if turn < len(times) else None
            yield chat.request(str(line.get("session", number)), chat.text(), reply, at)


def collapsed(messages: Sequence[Message], last: int) -> Iterator[Message]:
    """Yield the messages of a prompt with only the `last` observations in full."""
    observers = [number for number, message in enumerate(messages) if message["role"] in OBSERVERS]
    old = set(observers[1 : max(1, len(observers) - last)])
    for number, message in enumerate(messages):
        if number in old:
            lines = len(text_of(message).splitlines())
            yield {"role": message["role"], "content": f"Old environment output: ({lines} lines omitted)"}
        else:
            yield message
