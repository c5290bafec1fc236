"""Recorded agents' sessions, prompted as by an agent that collapses older observations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.errors import ConfigError
from headwater.traces.chat import Chat, Message, text_of
from headwater.traces.reader import calls_of, finite
from headwater.traces.request import Request, Trace
from headwater.traces.source import MALFORMED, Source, find
from headwater.traces.tokens import Remembered, Tokens

OBSERVERS = ("user", "tool")  # roles of messages that hold observations


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
