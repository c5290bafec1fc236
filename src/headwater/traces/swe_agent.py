"""Trajectories of SWE-agent and mini-SWE-agent."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from headwater.traces.chat import Chat, text_of
from headwater.traces.reader import has
from headwater.traces.request import TOKEN_BYTES, Request
from headwater.traces.request_logs import SharedTexts
from headwater.traces.rounds import Rounds, SessionFiles
from headwater.traces.source import Source
from headwater.traces.usage import usage_of

ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class SweAgent(SessionFiles):
    """A JSON object: `trajectory` [{`query`, `response`, ...}], `history` [{`role`, `content`, ...}], `info`.

    A step's `query` has the messages as they were sent, after SWE-agent's history processors. Older files have only
    the `history`, and mini-SWE-agent's `messages`, whose `extra.response.usage` is the provider's.
    Sources: github.com/SWE-agent/SWE-agent (docs/usage/trajectories.md), github.com/SWE-agent/mini-swe-agent
    (docs/usage/output_files.md).
    Inferred: from a history, each answer follows all messages before it; messages of other roles (the exit of
    mini-SWE-agent) are left out. Times are not recorded.
    """

    about = ".traj of SWE-agent, .traj.json of mini-SWE-agent"
    fields = ("trajectory", "history", "info", "messages", "trajectory_format")

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "trajectory", "history") or has(first, "info", "messages")

    def requests(self, source: Source) -> Iterator[Request]:
        for run in source.records():
            session = str(run.get("instance_id") or source.path.name.partition(".")[0])
            steps = run.get("trajectory") or ()
            if steps and all(has(step, "query", "response") for step in steps):
                yield from self._queries(session, steps)
            else:
                yield from self._history(session, run["messages"] if "messages" in run else run["history"])

    def _queries(self, session: str, steps: Any) -> Iterator[Request]:
        texts = SharedTexts()
        for step in steps:
            text, boundaries = Chat(self._tokens, step["query"]).asked()
            output: array[int] = self._tokens.of(step["response"]) + self._tokens.footer()[:1]
            n = len(text) // TOKEN_BYTES
            texts.add(Request(session, text, n, 0, n, boundaries=boundaries), output.tobytes())
        yield from texts.requests()

    def _history(self, session: str, messages: Any) -> Iterator[Request]:
        rounds = Rounds(self._tokens, session)
        for message in messages:
            role = ROLES.get(message["role"])
            if role == "assistant" and not message.get("is_demo"):
                extra = message.get("extra") or {}
                rounds.answer(text_of(message), None, usage_of((extra.get("response") or {}).get("usage")))
            elif role is not None:
                rounds.say(role, text_of(message))
        yield from self.requests_of(rounds)
