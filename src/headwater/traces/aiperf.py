"""Inputs of NVIDIA's AIPerf: turns, single requests, and the payloads that it sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from headwater.traces.reader import finite, has, seconds
from headwater.traces.request_logs import Logged, RequestLogs
from headwater.traces.usage import part_text


class AiPerf(RequestLogs):
    """Conversations `session_id`, `turns` [{`text`, `role`, `delay`, `output_length`}]; requests `text`; or one object
    with `data` [{`session_id`, `payloads`}], the `inputs.json` that each run writes.

    `delay` and `timestamp` are in ms. A first turn of role `system` is the system prompt of all.
    Source: github.com/ai-dynamo/aiperf (docs/tutorials: custom-dataset, multi-turn, inputs-json-replay).
    Inferred: answers of turns are not in the file: each is a text of `output_length` tokens in the next
    turn's prompt, equal for equal lengths; without a length it is left out.
    """

    about = "inputs: turns, single texts, inputs.json"
    fields = ("session_id", "turns", "text", "delay", "output_length", "timestamp", "data", "payloads")

    @staticmethod
    def matches(first: Any) -> bool:
        data = first.get("data") if isinstance(first, dict) else None
        is_inputs = isinstance(data, list) and bool(data) and has(data[0], "payloads")
        return is_inputs or has(first, "turns") or (has(first, "text") and isinstance(first["text"], str | list))

    def logged(self, line: Any) -> Iterable[Logged]:
        if "data" in line:
            for session in line["data"]:
                for payload in session["payloads"]:
                    yield Logged(payload, None, str(session["session_id"]))
        elif "turns" in line:
            yield from self._turns(line)
        else:
            yield from self._turns({"turns": [line], "session_id": line.get("session_id")})

    def _turns(self, line: Any) -> Iterator[Logged]:
        session, messages = line.get("session_id"), list[dict[str, str]]()
        for number, turn in enumerate(line["turns"]):
            turn = {"text": turn} if isinstance(turn, str) else turn
            messages.append({"role": turn.get("role") or "user", "content": part_text(turn["text"])})
            if turn.get("role") == "system" and not number:
                continue
            delay, length = turn.get("delay"), int(turn.get("output_length") or 0)
            answer = " answer" * length or None
            think = None if delay is None else finite(delay, "delay") / 1000
            name = None if session is None else str(session)
            yield Logged({"messages": list(messages)}, answer, name, seconds(turn), None, think)
            if answer:
                messages.append({"role": "assistant", "content": answer})
