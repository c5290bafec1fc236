"""Sessions of Codex, as it keeps them in ~/.codex/sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater.traces.reader import has, instant
from headwater.traces.request import Request
from headwater.traces.rounds import Rounds, SessionFiles
from headwater.traces.source import Source
from headwater.traces.usage import part_text, usage_of

ANSWERS = {"reasoning", "function_call", "custom_tool_call", "local_shell_call", "web_search_call"}
ROLES = {"developer": "system", "user": "user", "assistant": "assistant", "system": "system"}


class Codex(SessionFiles):
    """Rollouts (`rollout-*.jsonl`): {`timestamp`, `type`, `payload`} a line, of which the first is `session_meta`.

    `response_item` lines are messages, calls and their results; `event_msg` lines of type `token_count` follow each
    answer, with `last_token_usage` (`input_tokens` includes `cached_input_tokens`); `compacted` replaces the history.
    Source: github.com/openai/codex (codex-rs/protocol, rollout items), and sessions explained in
    github.com/uw-syfi/TraceLab (example_sessions/codex).
    Inferred: an answer's items are those since the last input; encrypted reasoning is left out; tools are hidden (see
    `Rounds`); a compaction without its history keeps the messages before the first answer.
    """

    about = "rollouts in ~/.codex/sessions, with usage"
    fields = ("timestamp", "type", "payload")

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "timestamp", "type", "payload") and first["type"] == "session_meta"

    def requests(self, source: Source) -> Iterator[Request]:
        rounds, counted = Rounds(self._tokens, source.path.stem, "codex"), None
        answer: list[str] = []
        sent: float | None = None
        instructions = 0  # messages of the session's head

        def close() -> None:
            if answer:
                rounds.answer("".join(answer), sent)
                answer.clear()

        for line in source.records():
            kind, item, at = line["type"], line["payload"], instant(line["timestamp"])
            if kind == "session_meta" and not rounds.messages:
                rounds.session = str(item.get("id") or rounds.session)
                rounds.say("system", part_text(item.get("base_instructions") or item.get("instructions")))
                instructions = rounds.messages
            elif kind == "response_item" and (item["type"] in ANSWERS or item.get("role") == "assistant"):
                answer.append(part_text(item))
            elif kind == "response_item":
                close()
                sent = at
                rounds.say(ROLES.get(item.get("role"), "tool"), part_text(item))
            elif kind == "compacted":
                close()
                self._compact(rounds, item, instructions)
            elif kind == "event_msg" and item.get("type") == "token_count" and item.get("info"):
                close()
                total = item["info"].get("total_token_usage")
                if total != counted:
                    counted = total
                    rounds.report(usage_of(item["info"].get("last_token_usage")))
        close()
        yield from self.requests_of(rounds)

    def _compact(self, rounds: Rounds, item: dict[str, Any], instructions: int) -> None:
        history = item.get("replacement_history")
        rounds.restart(instructions if history else rounds.beginning())
        for one in history or ():
            rounds.say(ROLES.get(one.get("role"), "tool"), part_text(one))
        rounds.say("user", "" if history else str(item.get("message") or ""))
