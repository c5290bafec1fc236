"""Sessions of Claude Code, as it keeps them in ~/.claude/projects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater.traces.reader import has, instant
from headwater.traces.request import Request
from headwater.traces.rounds import Rounds, SessionFiles
from headwater.traces.source import Source
from headwater.traces.tokens import Tokens
from headwater.traces.usage import part_text, usage_of

NO_MODEL = "<synthetic>"  # of answers that Claude Code itself wrote, as errors
HEADS = ("summary", "file-history-snapshot", "queue-operation", "progress")  # types without a message


class _Thread:
    """The main conversation of a file, or that of a sub-agent."""

    def __init__(self, tokens: Tokens, session: str, hidden: str) -> None:
        self.rounds = Rounds(tokens, session, hidden)
        self._answer = ""  # id of the last answer, which several lines may have in parts
        self._lengths: dict[str, int] = {}  # by line: messages of the history after it
        self._sent: float | None = None

    def add(self, line: dict[str, Any]) -> None:
        message, at = line.get("message"), instant(line["timestamp"])
        if line["type"] == "assistant" and message and message.get("model") != NO_MODEL:
            self._add_answer(message)
        elif line["type"] == "user" and message:
            self._rewind(line, message)
            self._sent = at
            self.rounds.say("user", part_text(message["content"]))
        self._lengths[str(line.get("uuid"))] = self.rounds.messages

    def _add_answer(self, message: dict[str, Any]) -> None:
        text, name = part_text(message["content"]), str(message.get("id"))
        if name == self._answer:
            self.rounds.extend(text)
        else:
            self.rounds.answer(text, self._sent)
        self._answer = name
        self.rounds.report(usage_of(message.get("usage")))

    def _rewind(self, line: dict[str, Any], message: dict[str, Any]) -> None:
        """Drop the history that a summary replaces, or that a user left; results of parallel calls leave none."""
        content = message["content"]
        is_result = isinstance(content, list) and any(has(part, "tool_use_id") for part in content)
        kept = self._lengths.get(str(line.get("parentUuid")), self.rounds.messages)
        if line.get("isCompactSummary"):
            self.rounds.restart()
        elif not is_result and kept < self.rounds.messages:
            self.rounds.restart(kept)


class ClaudeTranscripts(SessionFiles):
    """Transcripts: a line has `type`, `uuid`, `parentUuid`, `sessionId`, `timestamp`, `isSidechain`, `message`.

    An answer is one line or several with the same `message.id`, one a part; `message.usage` has its tokens, with
    `cache_read_input_tokens` and `cache_creation_input_tokens` apart from `input_tokens`. A user's line with
    `isCompactSummary` replaces the history, one whose parent is further up leaves what came since.
    Source: the lines as described in github.com/DRMacIver/claude-reliability (notes/transcript-format.md) and
    github.com/uw-syfi/TraceLab (docs/prompt_cache_accounting.md).
    Inferred: a sub-agent (`isSidechain`) is a session of its own; system prompt and tools are hidden (see `Rounds`).
    """

    about = "transcripts in ~/.claude/projects, with usage"
    fields = ("type", "uuid", "parentUuid", "sessionId", "timestamp", "isSidechain", "message")

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "sessionId", "type") or (has(first, "type") and first["type"] in HEADS)

    def requests(self, source: Source) -> Iterator[Request]:
        threads: dict[str, _Thread] = {}
        for line in source.records():
            if line["type"] not in ("user", "assistant", "system", "attachment") or "timestamp" not in line:
                continue
            session = str(line.get("sessionId") or source.path.stem)
            agent = str(line.get("agentId") or "agent") if line.get("isSidechain") else ""
            thread = threads.get(agent)
            if thread is None:
                name, hidden = (f"{session}/{agent}", "agent") if agent else (session, "claude")
                thread = threads[agent] = _Thread(self._tokens, name, hidden)
            thread.add(line)
        yield from self.requests_of(*(thread.rounds for thread in threads.values()))
