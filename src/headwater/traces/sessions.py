"""Sessions with their messages, one a line: of agents, with calls and times, and of chats.

`messages` and `calls` [n, ...]: call i asked for messages[:n_i] and was answered by messages[n_i], `t`[i] seconds after
`t0`. `branches` [{`at`, `messages`, `reply`}] are requests that fork off messages[:at]. Without `calls`, messages that
end with the assistant's are a chat: each assistant's message answers what comes before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater.traces.chat import Chat
from headwater.traces.reader import finite, has
from headwater.traces.request import Request
from headwater.traces.source import Source
from headwater.traces.tokens import Tokens


class Sessions:
    """A session's requests share one text."""

    block_tokens = 1
    interleaved = False

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._prompt_tokens = self._logged_tokens = 0

    @staticmethod
    def matches(first: Any) -> bool:
        if not has(first, "messages") or has(first, "response"):
            return False
        return "calls" in first or (bool(first["messages"]) and first["messages"][-1].get("role") == "assistant")

    def requests(self, source: Source) -> Iterator[Request]:
        for number, line in enumerate(source.records(), 1):
            messages, name = line["messages"], str(line.get("session", number))
            calls = line["calls"] if "calls" in line else _replies(messages)
            if sorted(set(calls)) != calls or (calls and not 0 < calls[0] <= calls[-1] < len(messages)):
                raise ValueError(f"calls are {str(calls)[:60]}, must ascend from 1 to at most {len(messages) - 1}")
            chat = Chat(self._tokens, messages)
            text, times, usage = chat.text(), self._times(line, len(calls)), line.get("usage") or ()
            for turn, reply in enumerate(calls):
                request = chat.request(name, text, reply, times[turn])
                if turn < len(usage):
                    self._prompt_tokens += request.prompt_tokens
                    self._logged_tokens += usage[turn][0]
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


def _replies(messages: list[Any]) -> list[int]:
    return [number for number, message in enumerate(messages) if number and message["role"] == "assistant"]
