"""From an answer's text, however it is cut, to reasoning, content and tool calls."""

from __future__ import annotations

from headwater.server.answer.formats.delta import Content, Delta
from headwater.server.answer.formats.reasoning import ReasoningFormat, ReasoningSplitter
from headwater.server.answer.formats.tools import CallSplitter, ToolFormat, Tools


class AnswerParser:
    """Never raises, whatever the text. Joined, the deltas are the same however the text was cut.

    Nothing is lost but markup and the white space beside it: what is no well-formed call comes out as content, or,
    where a call has begun, in its arguments.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        thinking: bool = False,
        tool_format: ToolFormat | None = None,
        tools: Tools | None = None,
    ) -> None:
        """`thinking`: the prompt left the reasoning open. Calls are looked for only if there are tools to call."""
        self._reasoning = ReasoningSplitter(reasoning, thinking) if reasoning else None
        self._calls = CallSplitter(tool_format, tools) if tool_format and tools else None

    def push(self, text: str) -> list[Delta]:
        return self._split(self._reasoning.push(text) if self._reasoning else [Content(text)])

    def finish(self) -> list[Delta]:
        """What was held back. Nothing may be pushed after it."""
        deltas = self._split(self._reasoning.finish()) if self._reasoning else []
        return deltas + self._calls.finish() if self._calls else deltas

    def _split(self, deltas: list[Delta]) -> list[Delta]:
        if self._calls is None:
            return deltas
        out: list[Delta] = []
        for delta in deltas:
            out += self._calls.push(delta.text) if isinstance(delta, Content) else [delta]
        return out
