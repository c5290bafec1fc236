"""Agents that hold a session over HTTP, each with the bodies and the habits of a real one; what they do is scripted.

Claude Code sends system blocks with a billing line, and reminders after results; Codex sends instructions, developer
items and every item of an answer back; Qwen Code sends calls with a null content; aider talks without tools and puts a
system message in the middle; Cline has its calls as XML in the text, and results as the user's text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "all": {"type": "boolean"}},
    "required": ["path"],
}
RULES = "You are a coding agent. Work in small steps, and say what you did. " * 4


@dataclass
class Agent:
    """Agent on chat completions; others differ in their paths and forms."""

    asks = False  # the last turn is one that the model answers

    turns: list[Json] = field(default_factory=list)  # after the system's, as this API writes them
    requests: int = 0
    path = "/v1/chat/completions"
    moves = False  # a message stands at another place in each request

    def body(self) -> Json:
        """Return the next request."""
        self.requests += 1
        function = {"name": "read", "description": "Read a file.", "parameters": PARAMETERS}
        tools = [{"type": "function", "function": function}]
        return {"model": "m", "messages": [{"role": "system", "content": RULES}, *self.turns], "tools": tools}

    def say(self, text: str) -> None:
        self.asks = True
        self.turns.append({"role": "user", "content": text})

    def take(self, answer: Json) -> None:
        """Append the answer to the history, and results of its calls."""
        message = answer["choices"][0]["message"]
        self.asks = bool(message.get("tool_calls"))
        self.turns.append(message)
        for call in message.get("tool_calls") or ():
            self.turns.append({"role": "tool", "tool_call_id": call["id"], "content": f"line {self.requests}"})

    def compact(self) -> None:
        """Replace the history by a summary; the last call and its result stay without the user's query."""
        last = next(i for i in reversed(range(len(self.turns))) if self.turns[i]["role"] == "assistant")
        self.turns = [{"role": "user", "content": "Summary: files were read."}, *self.turns[last:]]


class QwenCode(Agent):
    def take(self, answer: Json) -> None:
        super().take(answer)
        for turn in self.turns:
            if turn.get("tool_calls"):
                turn["content"] = turn["content"] or None

    def compact(self) -> None:
        super().compact()
        del self.turns[0]  # what follows a summary in the system's text


class Aider(Agent):
    moves = True

    def body(self) -> Json:
        body = super().body()
        reminder = {"role": "system", "content": "Answer with SEARCH/REPLACE blocks only."}
        return {"model": "m", "messages": [*body["messages"][:-1], reminder, body["messages"][-1]], "max_tokens": 0}


class Cline(Agent):
    def body(self) -> Json:
        body = super().body()
        parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in body["messages"][1:]]
        return {"model": "m", "messages": [body["messages"][0], *parts], "max_tokens": -1, "temperature": 0}

    def take(self, answer: Json) -> None:
        content = answer["choices"][0]["message"]["content"] or ""
        self.turns.append({"role": "assistant", "content": content})
        self.asks = "<read" in content
        if self.asks:
            self.turns.append({"role": "user", "content": f"[read] Result:\nline {self.requests}"})


class ClaudeCode(Agent):
    path = "/v1/messages"

    def body(self) -> Json:
        self.requests += 1
        billing = f"x-anthropic-billing-header: cc_version=2.1; cch={self.requests:05x};"
        rules = {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}}
        return {
            "model": "m",
            "max_tokens": 900,
            "system": [{"type": "text", "text": billing}, rules],
            "messages": self.turns,
            "tools": [{"name": "read", "description": "Read a file.", "input_schema": PARAMETERS}],
            "metadata": {"user_id": f"session-{self.requests}"},
        }

    def say(self, text: str) -> None:
        self.asks = True
        blocks = [{"type": "text", "text": text}]
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns[-1]["content"] += blocks
        else:
            self.turns.append({"role": "user", "content": blocks})

    def take(self, answer: Json) -> None:
        self.turns.append({"role": "assistant", "content": answer["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": one["id"], "content": [
                {"type": "text", "text": f"line {self.requests}"}, {"type": "image", "source": {"type": "base64"}}]}
            for one in answer["content"] if one["type"] == "tool_use"
        ]  # fmt: skip
        self.asks = bool(results)
        if results:
            reminder = {"type": "text", "text": "<system-reminder>The file changed.</system-reminder>"}
            self.turns.append({"role": "user", "content": [*results, reminder]})

    def compact(self) -> None:
        last = next(i for i in reversed(range(len(self.turns))) if self.turns[i]["role"] == "assistant")
        self.turns = [{"role": "user", "content": "Summary: files were read."}, *self.turns[last:]]


class Codex(Agent):
    path = "/v1/responses"

    def body(self) -> Json:
        self.requests += 1
        context = {"type": "input_text", "text": "<environment_context><cwd>/w</cwd></environment_context>"}
        developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be careful."}]}
        return {
            "model": "m",
            "instructions": RULES,
            "input": [developer, {"type": "message", "role": "user", "content": [context]}, *self.turns],
            "tools": [{"type": "function", "name": "read", "parameters": PARAMETERS},
                      {"type": "custom", "name": "apply_patch", "format": {"type": "text"}}, {"type": "web_search"}],
            "reasoning": {"effort": "none", "summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
        }  # fmt: skip

    def say(self, text: str) -> None:
        self.asks = True
        self.turns.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]})

    def take(self, answer: Json) -> None:
        self.turns += answer["output"]
        self.asks = any(item["type"] == "function_call" for item in answer["output"])
        for item in answer["output"]:
            if item["type"] == "function_call":
                output = {"type": "function_call_output", "call_id": item["call_id"], "output": f"line {self.requests}"}
                self.turns.append(output)
        self.turns.append({"type": "ghost_snapshot", "ghost_commit": {}})

    def compact(self) -> None:
        self.turns = [{"type": "compaction", "encrypted_content": "zzz"}, *self.turns[-3:]]


AGENTS = {"claude_code": ClaudeCode, "codex": Codex, "qwen_code": QwenCode, "aider": Aider, "cline": Cline}


def call_of(form: str, **arguments: Any) -> str:
    """Return a call of `read` as a model writes it in a format."""
    text = json.dumps(arguments)
    match form:
        case "qwen_xml":
            given = "".join(
                f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
                for name, value in arguments.items()
            )
            return f"<tool_call>\n<function=read>\n{given}</function>\n</tool_call>"
        case "nemotron":
            return f'<TOOLCALL>[{{"name": "read", "arguments": {text}}}]</TOOLCALL>'
        case "cline":
            return f"<read><path>{arguments['path']}</path></read>"
    return f'<tool_call>\n{{"name": "read", "arguments": {text}}}\n</tool_call>'
