"""Qwen-Bailian's usage traces: requests to Qwen models at Alibaba, as hashed blocks of 16 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater.traces.hashed_blocks import BlockTexts, without_ids
from headwater.traces.reader import Reader, finite, has, whole
from headwater.traces.request import Request
from headwater.traces.source import Source


class Bailian(Reader):
    """A request a line: `chat_id`, `parent_chat_id` (-1: none), `timestamp` (seconds), `input_length`,
    `output_length`, `type`, `turn`, and `hash_ids` of blocks of 16 tokens, the last of which may be partial.

    Source: github.com/alibaba-edu/qwen-bailian-usagetraces-anon (Apache 2.0; Wang et al., USENIX ATC '25).
    Inferred: requests linked by `parent_chat_id` are a session; an answer is known if the next turn continues it. A
    parent that is not in the file begins a session.
    """

    about = "ATC '25: blocks of 16 tokens, sessions, seconds"
    fields = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "turn", "hash_ids")
    is_sizable = True
    block_tokens = 16
    interleaved = True

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "chat_id", "parent_chat_id", "hash_ids")

    def requests(self, source: Source) -> Iterator[Request]:
        texts, sessions = BlockTexts(0, self.block_tokens), dict[Any, str]()
        for line in source.lines():
            rest, ids = without_ids(line)
            turn = source.parsed(rest)
            raw, length = ids[turn["hash_ids"]], whole(turn, "input_length")
            session = sessions.get(turn["parent_chat_id"], str(turn["chat_id"]))
            sessions[turn["chat_id"]] = session
            blocks = length // self.block_tokens
            full = b",".join(raw.split(b",", blocks)[:blocks])
            times = finite(turn["timestamp"], "timestamp")
            texts.add(session, full, length, whole(turn, "output_length"), None, 0, times)
        yield from texts.requests()

    def notes(self) -> tuple[str, ...]:
        return (
            f"blocks of {self.block_tokens} tokens: only full ones count",
            "an answer is known if the session's next request continues it, else it is not cached",
        )
