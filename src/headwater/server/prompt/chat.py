"""From a conversation to a prompt: render, tokenise once, and find by probing where the prompt's known parts end.

A probe renders the conversation again with one thing changed. What the two texts share, mapped to tokens, is a
boundary, whatever the template does: insert defaults, strip reasoning, sort tools. A probe that fails, or that
changes nothing, drops its boundary.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from headwater.errors import TemplateError
from headwater.request import Boundaries, Span
from headwater.server.prompt import documents
from headwater.server.prompt.encoding import Encoded
from headwater.server.prompt.marks import Edge, marked, rendered_marks, shown
from headwater.server.prompt.segments import SegmentEncoder
from headwater.server.prompt.template import ChatTemplate
from headwater.server.requests.messages import Breakpoint, Conversation, Message

REASONING, ANSWER, QUESTION = "Hm, thus.", "Quite so.", "Quick, why?"  # what probes put into a conversation
STAND_INS = ("Quick, why?", "zigzag?")  # for a message; one of them begins unlike it
# likewise, in the place of the tools behind a breakpoint
MARK_TOOL = {"type": "function", "function": {"name": "zigzag", "parameters": {"type": "object", "properties": {}}}}
END = 200  # characters of the prompt's end that are looked at
OPEN_REASONING = re.compile(r"<(\w*think\w*)>\s*\Z")  # a generation prompt that leaves the model thinking
TOOL_RESPONSE = re.compile(r"\s*<tool_response>")  # some clients send what a tool returned as a user's message


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    tokens: tuple[int, ...]
    boundaries: Boundaries
    keep_output: bool  # False: no next turn's prompt begins with this prompt and its output
    end: str = ""  # the prompt's last characters: they tell whether the model is left thinking
    segments: tuple[Span, ...] = ()


class ChatPrompter:
    """Makes prompts of conversations. Thread safe."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, encoder: SegmentEncoder | None = None) -> None:
        self._encoder = SegmentEncoder(tokenizer) if encoder is None else encoder
        self._template = template.replacing(self._encoder.separator, Edge.SEPARATOR.value)

    def prepare(self, conversation: Conversation, namespace: str = "") -> ChatPrompt:
        """Raises TemplateError if the template refuses the conversation itself; probes may fail.

        What was tokenised before for this namespace is not again.
        """
        conversation = marked(self._addressed(conversation), self._encoder.separator)
        text = self._render(conversation, generate=True)
        encoded = self._encoder.encode(text, rendered_marks(text), namespace)
        boundaries, keep_output = self._probe(conversation, text, encoded)
        end = shown(text, self._encoder.separator)[-END:]
        return ChatPrompt(encoded.ids, boundaries, keep_output, end, encoded.segments)

    def _addressed(self, conversation: Conversation) -> Conversation:
        """A developer speaks as the system where the template knows no developers."""
        if self._template.mentions("developer"):
            return conversation
        messages = ({**m, "role": "system"} if m["role"] == "developer" else m for m in conversation.messages)
        return replace(conversation, messages=tuple(messages))

    def _render(self, conversation: Conversation, generate: bool) -> str:
        variables = {**conversation.variables, "tools": conversation.tools, "add_generation_prompt": generate}
        messages = list(conversation.messages)
        if conversation.documents and self._template.reads("documents"):
            variables["documents"] = self._for_template(conversation)
        elif conversation.documents:
            messages = with_documents(conversation)
        try:
            return self._template.render(messages, conversation.now, variables)
        except TemplateError as error:
            raise TemplateError(shown(str(error), self._encoder.separator)) from error

    def _for_template(self, conversation: Conversation) -> list[dict[str, Any]]:
        """A template that writes separators itself is left to it."""
        if self._template.mentions(Edge.SEPARATOR.value):
            return list(conversation.documents)
        return documents.for_template(conversation.documents)

    def _probe(self, conversation: Conversation, text: str, encoded: Encoded) -> tuple[Boundaries, bool]:
        user_turns = [i for i, m in enumerate(conversation.messages) if m["role"] == "user"]
        queries = queries_of(conversation)
        answer = dummy_answer(text)
        nexts = [self._try_render(extended(conversation, turns)) for turns in next_turns(conversation, answer)]

        def boundary(probe: str | None) -> int | None:
            # one token less: the last one's border may move with what comes after it
            return (
                None
                if probe is None or probe == text
                else max(0, bisect_right(encoded.ends, common_prefix(text, probe)) - 1)
            )

        first = self._replaced(conversation, user_turns[:1])
        last = first if queries[-1:] == user_turns[:1] else self._replaced(conversation, queries[-1:])
        # a template may put a space before an answer that has none, since its model begins answers with one
        kept = [rendered.startswith((text + answer, f"{text} {answer}")) for rendered in nexts if rendered is not None]
        asked = sorted({at for probe in self._marked(conversation) if (at := boundary(probe)) is not None})
        return Boundaries(boundary(first), boundary(last), boundary(nexts[0]), tuple(asked)), not kept or any(kept)

    def _replaced(self, conversation: Conversation, which: list[int]) -> str | None:
        """The conversation with that message's content replaced, or None if there is no such message."""
        if not which:
            return None
        return self._try_render(with_content(conversation, which[0], stand_in_for), generate=True)

    def _marked(self, conversation: Conversation) -> Iterator[str | None]:
        """For each breakpoint the conversation rendered with something else behind it."""
        for point in conversation.breakpoints:
            yield self._try_render(with_content(conversation, point.message, partial(cut_at, point)), generate=True)
        for number in conversation.tool_breakpoints:
            tools = [*(conversation.tools or ())[: number + 1], MARK_TOOL]
            yield self._try_render(replace(conversation, tools=tools), generate=True)

    def _try_render(self, conversation: Conversation, generate: bool = False) -> str | None:
        try:
            return self._render(conversation, generate)
        except TemplateError:
            return None


def queries_of(conversation: Conversation) -> list[int]:
    """Numbers of the messages in which a user asks."""
    messages = enumerate(conversation.messages)
    return [i for i, m in messages if m["role"] == "user" and not TOOL_RESPONSE.match(m["content"])]


def with_documents(conversation: Conversation) -> list[Message]:
    """The messages with the documents in front of the last query, for a template that reads none."""
    messages, queries = list(conversation.messages), queries_of(conversation)
    if not queries:
        sent = f"{len(conversation.documents):,} documents go before the user's last message"
        raise TemplateError(f"{sent}, but none of the {len(messages):,} messages is a user's")
    last = messages[queries[-1]]
    messages[queries[-1]] = {**last, "content": documents.before(last["content"], conversation.documents)}
    return messages


def dummy_answer(prompt: str) -> str:
    """An answer as the model will give it: reasoning first, if the generation prompt leaves it thinking."""
    tag = OPEN_REASONING.search(prompt[-END:])
    return f"{REASONING}\n</{tag[1]}>\n\n{ANSWER}" if tag else ANSWER


def with_content(conversation: Conversation, number: int, changed: Callable[[str], str]) -> Conversation:
    """The conversation with one message's content changed."""
    messages = list(conversation.messages)
    messages[number] = {**messages[number], "content": changed(messages[number]["content"])}
    return replace(conversation, messages=tuple(messages))


def stand_in_for(text: str) -> str:
    """Another text, which begins unlike this one."""
    return STAND_INS[text.strip()[:1] == STAND_INS[0][0]]


def cut_at(point: Breakpoint, content: str) -> str:
    """The content up to a breakpoint, then something unlike what follows it."""
    return content[: point.characters] + stand_in_for(content[point.characters :])


def next_turns(conversation: Conversation, answer: str) -> list[list[Message]]:
    """How the conversation may go on: with a user's turn, and with a tool's if there are tools."""
    reply = {"role": "assistant", "content": answer}
    turns = [[reply, {"role": "user", "content": QUESTION}]]
    if conversation.tools:
        turns.append([reply, {"role": "tool", "content": QUESTION, "tool_call_id": "call"}])
    return turns


def extended(conversation: Conversation, turns: list[Message]) -> Conversation:
    return replace(conversation, messages=(*conversation.messages, *turns))


def common_prefix(a: str, b: str) -> int:
    """Length in characters, by bisection: each comparison is a memcmp of what is still open."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
