"""Sessions of Claude Code as hashed blocks of 64 tokens, one a line (kv-cache-tester's traces).

`hash_id_scope` tells whether ids have a meaning beyond their session ("global") or not ("local"). A request has `in`,
`out` and `hash_ids` of its full blocks; a sub-agent is an entry with `requests` of its own and its parent's ids. Some
recordings hold a turn twice, streamed and not: the second of such a pair is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headwater.traces.block_text import BlockTexts
from headwater.traces.reader import finite, has, whole
from headwater.traces.request import Request
from headwater.traces.source import Source
from headwater.traces.tokens import Tokens

SCOPE_BITS = 32  # a session's number stands above the ids that have a meaning in it only
IDS = b'"hash_ids"'


class ClaudeCode:
    block_tokens = 64
    interleaved = False

    def __init__(self, tokens: Tokens) -> None:
        self._pairs = self._subagents = 0

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "hash_id_scope", "requests")

    def requests(self, source: Source) -> Iterator[Request]:
        for number, line in enumerate(source.lines(), 1):
            rest, ids = without_ids(line)
            session = source.parsed(rest)
            if whole(session, "block_size") != self.block_tokens:
                raise ValueError(f"block_size is {session['block_size']:,}, must be {self.block_tokens}")
            texts = BlockTexts(number << SCOPE_BITS if session["hash_id_scope"] == "local" else 0, self.block_tokens)
            name = str(session.get("id", number))
            self._add(texts, name, session, [r for r in session["requests"] if r["type"] != "subagent"], ids)
            for entry in session["requests"]:
                if entry["type"] == "subagent":
                    self._subagents += 1
                    self._add(texts, f"{name}/{entry['agent_id']}", entry, entry["requests"], ids)
            yield from texts.requests()

    def notes(self) -> tuple[str, ...]:
        dropped = [f"{self._pairs:,} second copies of a turn were dropped"] if self._pairs else []
        agents = [f"{self._subagents:,} sub-agents are sessions of their own"] if self._subagents else []
        return (
            "blocks of 64 tokens: only full ones count",
            "what was generated is known where the session's next request goes on from it, else it is not cached",
            "when sessions began is not known: it is drawn",
            *dropped,
            *agents,
        )

    def _add(
        self, texts: BlockTexts, name: str, of: Mapping[str, Any], requests: list[dict[str, Any]], ids: list[bytes]
    ) -> None:
        """The requests of one thread. `of` tells how long its system prompt is, with its tools."""
        before: dict[str, Any] | None = None
        system = (of.get("tool_tokens") or 0) + (of.get("system_tokens") or 0)
        for request in requests:
            raw = ids[request["hash_ids"]]
            if before is not None and before["type"] != request["type"] and ids[before["hash_ids"]] == raw:
                before, self._pairs = None, self._pairs + 1  # the pair is complete
                continue
            before = request
            think = request.get("think_time")
            n_in, n_out = whole(request, "in"), whole(request, "out")
            texts.add(name, raw, n_in, n_out, None if think is None else finite(think, "think_time"), system)


def without_ids(line: bytes) -> tuple[bytes, list[bytes]]:
    """The line with each list of ids replaced by its number, and the lists, unread.

    Reading 70 million numbers would take ten times as long as all else, and all but a few are those of the request
    before.
    """
    parts: list[bytes] = []
    lists: list[bytes] = []
    at = 0
    while (found := line.find(IDS, at)) >= 0:
        begin = line.index(b"[", found) + 1
        end = line.index(b"]", begin)
        parts += [line[at : begin - 1], b"%d" % len(lists)]
        lists.append(line[begin:end])
        at = end + 1
    return b"".join([*parts, line[at:]]), lists
