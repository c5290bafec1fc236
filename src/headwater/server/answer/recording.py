"""Parser that keeps the calls of an answer as the model wrote them, for the prompts that repeat them."""

from __future__ import annotations

from dataclasses import replace

from headwater.server.answer.formats.parser import CallArguments, CallBegin, Content, Delta, Reasoning
from headwater.server.answer.forms import Parser, new_call_id
from headwater.server.prompt.written import Call, WrittenCalls


class RecordingParser:
    """Parser that gives each call an id, and keeps the calls when the answer ends."""

    def __init__(self, parser: Parser, written: WrittenCalls, namespace: str, id_prefix: str, close: str) -> None:
        """`close`: the tag that ends reasoning."""
        self._parser, self._written, self._namespace = parser, written, namespace
        self._id_prefix, self._close = id_prefix, close
        self._text = ""
        self._content: list[str] = []  # before the first call
        self._calls: list[Call] = []
        self._reasons = self._goes_on = False  # reasoning has come; content has come after a call

    def push(self, text: str) -> list[Delta]:
        """Parse the next piece of text."""
        self._text += text
        return [self._kept(delta) for delta in self._parser.push(text)]

    def finish(self) -> list[Delta]:
        """Release the text that was held back, and keep the calls; nothing may be pushed afterwards."""
        deltas = [self._kept(delta) for delta in self._parser.finish()]
        if self._calls and not self._goes_on and (written := self._calls_as_written()):
            self._written.add(self._namespace, self._calls, written)
        return deltas

    def _kept(self, delta: Delta) -> Delta:
        match delta:
            case CallBegin(name, id_):
                delta = CallBegin(name, id_ or new_call_id(self._id_prefix))
                self._calls.append(Call(str(delta.id), name, ""))
            case CallArguments(text):
                self._calls[-1] = replace(self._calls[-1], arguments=self._calls[-1].arguments + text)
            case Content(text) if self._calls:
                self._goes_on = self._goes_on or bool(text.strip())
            case Content(text):
                self._content.append(text)
            case Reasoning(text):
                self._reasons = self._reasons or bool(text)
        return delta

    def _calls_as_written(self) -> str:
        """Return the text of the calls with the white space before them; empty if they cannot be found in it."""
        answer = self._text
        if self._reasons:
            answer = answer.partition(self._close)[2]
        content, answer = "".join(self._content), answer.lstrip("\n")
        return answer[len(content) :].rstrip() if answer.startswith(content) else ""
