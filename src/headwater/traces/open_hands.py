"""Trajectories of OpenHands, of its runtime (version 0) and its SDK (version 1)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from headwater.traces.reader import has, instant
from headwater.traces.request import Request
from headwater.traces.rounds import Rounds, SessionFiles, text_field
from headwater.traces.source import Source
from headwater.traces.usage import part_text, usage_of

KINDS = ("SystemPromptEvent", "MessageEvent", "ActionEvent", "ObservationEvent", "Condensation")
NO_CALL = ("system", "message", "recall", "change_agent_state", "null", "condensation")  # actions of version 0


class OpenHands(SessionFiles):
    """Events of a session: an array (`trajectory.json`), lines, or the `history` of a line with an `instance_id`.

    Version 0: `action` with `args`, or `observation` with `content`; `tool_call_metadata.model_response` is the API's
    answer with its usage, repeated for each of its calls. Version 1: `kind`, with `llm_message`, `thought` and
    `tool_call`, or `observation`; events of one answer share an `llm_response_id`.
    Sources: github.com/All-Hands-AI/OpenHands (events/serialization), github.com/OpenHands/software-agent-sdk (event).
    Inferred: an answer follows all events before it; a condensation keeps those before the first answer and its
    summary.
    """

    about = "trajectory.json and output.jsonl, versions 0 and 1"
    fields = ("id", "timestamp", "source", "action", "args", "observation", "kind", "history", "instance_id")

    @staticmethod
    def matches(first: Any) -> bool:
        is_event = has(first, "source", "action") or has(first, "source", "observation")
        return is_event or has(first, "instance_id", "history") or (has(first, "kind") and first["kind"] in KINDS)

    def requests(self, source: Source) -> Iterator[Request]:
        records = source.records()
        first = next(records)
        if "history" in first:
            for run in (first, *records):
                yield from self._session(str(run["instance_id"]), run["history"])
        else:
            name = source.path.name.partition(".")[0]
            session = source.path.parent.name if name in ("trajectory", "events") else name
            yield from self._session(session, (first, *records))

    def _session(self, session: str, events: Iterable[dict[str, Any]]) -> Iterator[Request]:
        rounds, last, sent = Rounds(self._tokens, session), "", None
        for event in events:
            role, text, answer = _as_message_1(event) if "kind" in event else _as_message_0(event)
            if role == "assistant":
                if answer and answer == last:
                    rounds.extend(text if "kind" in event else "")  # version 0 repeats the whole answer
                else:
                    rounds.answer(text, sent, _usage(event))
                last = answer
            elif role == "summary":
                rounds.restart(rounds.beginning())
                rounds.say("user", text)
            elif text:
                rounds.say(role, text)
                sent = instant(event["timestamp"]) if event.get("timestamp") else None
        yield from self.requests_of(rounds)


def _as_message_0(event: dict[str, Any]) -> tuple[str, str, str]:
    """Return role, text and the answer's id of an event of version 0."""
    if "observation" in event:
        return "tool", text_field(event, "content"), ""
    action, args = event["action"], event.get("args") or {}
    response = (event.get("tool_call_metadata") or {}).get("model_response") or {}
    if action == "system":
        return "system", text_field(args, "content"), ""
    if action == "condensation":
        return "summary", text_field(args, "summary"), ""
    if event.get("source") == "agent" and response.get("choices"):
        message = response["choices"][0]["message"]
        calls = json.dumps(message["tool_calls"], sort_keys=True) if message.get("tool_calls") else ""
        return "assistant", part_text(message.get("content")) + calls, str(response.get("id"))
    if action == "message":
        return "assistant" if event.get("source") == "agent" else "user", text_field(args, "content"), ""
    if action in NO_CALL:
        return "", "", ""
    return "assistant", text_field(args, "thought") + json.dumps({"action": action, "args": args}, sort_keys=True), ""


def _as_message_1(event: dict[str, Any]) -> tuple[str, str, str]:
    """Return role, text and the answer's id of an event of version 1."""
    kind, answer = event["kind"], str(event.get("llm_response_id") or "")
    if kind == "SystemPromptEvent":
        return "system", part_text(event["system_prompt"]) + json.dumps(event.get("tools") or [], sort_keys=True), ""
    if kind == "MessageEvent":
        role = "assistant" if event.get("source") == "agent" else "user"
        return role, part_text(event["llm_message"]), answer
    if kind == "ActionEvent":
        return "assistant", part_text(event.get("thought")) + part_text(event.get("tool_call")), answer
    if kind == "Condensation":
        return "summary", text_field(event, "summary"), ""
    return "tool", part_text(event.get("observation") or event.get("error")), ""


def _usage(event: dict[str, Any]) -> Any:
    response = (event.get("tool_call_metadata") or {}).get("model_response") or {}
    return usage_of(response.get("usage"))
