"""Sessions of agents that log one event after the other, as requests: rounds of messages, an answer, and its usage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.traces.chat import Chat, Message
from headwater.traces.reader import Reader
from headwater.traces.request import TOKEN_BYTES, Request, Usage
from headwater.traces.tokens import Remembered, Tokens

NO_SYSTEM: Message = {"role": "system", "content": ""}


@dataclass(slots=True)
class _Asked:
    reply: int  # number of the answer among the messages
    at: float | None
    usage: Usage | None


@dataclass(slots=True)
class _Part:
    """Messages that only grow, until the history is replaced."""

    messages: list[Message] = field(default_factory=list)
    asked: list[_Asked] = field(default_factory=list)


class Rounds:
    """One session. System prompt and tools that its log does not have are inferred: what the first usage has more.

    `hidden`: the word that stands for them, equal in all sessions that share it.
    """

    def __init__(self, tokens: Tokens, session: str, hidden: str = "hidden") -> None:
        self.session, self._tokens, self._hidden = session, tokens, hidden
        self._parts = [_Part()]

    @property
    def messages(self) -> int:
        """Number of messages of the history."""
        return len(self._parts[-1].messages)

    def say(self, role: str, text: str) -> None:
        """Append a message that is not an answer."""
        if text:
            self._parts[-1].messages.append({"role": role, "content": text})

    def answer(self, text: str, at: float | None = None, usage: Usage | None = None) -> None:
        """Append the answer to all messages so far, which was requested at `at`."""
        self._parts[-1].asked.append(_Asked(self.messages, at, usage))
        self._parts[-1].messages.append({"role": "assistant", "content": text})

    def extend(self, text: str) -> None:
        """Append to the last answer."""
        part = self._parts[-1]
        reply = part.asked[-1].reply
        part.messages[reply] = {"role": "assistant", "content": str(part.messages[reply]["content"]) + text}

    def report(self, usage: Usage | None) -> None:
        """Set the usage of the last answer."""
        asked = self._parts[-1].asked
        if asked and usage is not None:
            asked[-1].usage = usage

    def restart(self, kept: int = 0) -> None:
        """Continue with the first `kept` messages only: after a rewind, or a compaction of the history."""
        self._parts.append(_Part(self._parts[-1].messages[:kept]))

    def beginning(self) -> int:
        """Return the number of messages before the first answer."""
        part = self._parts[-1]
        return part.asked[0].reply if part.asked else len(part.messages)

    def requests(self) -> Iterator[Request]:
        """Yield the session's requests."""
        hidden = self._hidden_tokens()
        for part in self._parts:
            system = [{"role": "system", "content": f" {self._hidden}" * hidden}] if hidden else []
            chat = Chat(self._tokens, [*system, *part.messages])
            text = chat.text()
            for one in part.asked:
                request = chat.request(self.session, text, one.reply + len(system), one.at)
                yield replace(request, usage=one.usage)

    def _hidden_tokens(self) -> int:
        for part in self._parts:
            for one in part.asked:
                if one.usage is not None:
                    own = Chat(self._tokens, [NO_SYSTEM, *part.messages[: one.reply]]).asked()[0]
                    return max(0, one.usage.prompt_tokens - len(own) // TOKEN_BYTES)
        return 0


class SessionFiles(Reader):
    """Reader of files that have one session each, a folder of which is a trace."""

    is_folder = True

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(Remembered(tokens))
        self._prompt_tokens = self._logged_tokens = 0

    def requests_of(self, *sessions: Rounds) -> Iterator[Request]:
        """Yield the requests of all sessions in a file."""
        for rounds in sessions:
            for request in rounds.requests():
                if request.usage is not None:
                    self._prompt_tokens += request.prompt_tokens
                    self._logged_tokens += request.usage.prompt_tokens
                yield request

    def notes(self) -> tuple[str, ...]:
        if not self._logged_tokens:
            return ()
        ratio = self._prompt_tokens / self._logged_tokens
        return (
            f"{self._prompt_tokens:,} prompt tokens, {ratio:.3f} of the {self._logged_tokens:,} that were reported",
            "system prompt and tools are not in the files: inferred from the first usage, and equal in all sessions",
        )


def text_field(record: Any, *names: str) -> str:
    """Return the first of these fields that is a text; "" without one."""
    return next((record[name] for name in names if isinstance(record.get(name), str)), "")
