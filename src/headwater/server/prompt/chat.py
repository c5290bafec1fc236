"""Prompts of conversations: rendered by the chat template, tokenised once, with boundaries found by probing.

A probe renders the conversation again with one change. The prefix that the two texts share, mapped to tokens, ends at
a boundary, whatever the template does: insert defaults, strip reasoning, sort tools. A probe that fails, or changes
nothing, drops its boundary.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from headwater.errors import TemplateError
from headwater.plan import Retention
from headwater.request import Boundaries, Generation, SamplingParams
from headwater.server.prompt.encoding import Encoded
from headwater.server.prompt.rules import call_form_of, described, needs_descriptions, rules_of, writes_space
from headwater.server.prompt.segments import Edge, SegmentEncoder, as_segment, marked, rendered_marks, shown
from headwater.server.prompt.template import ChatTemplate, common_prefix
from headwater.server.prompt.written import WrittenCalls, spliced, with_stand_ins
from headwater.server.requests.messages import Breakpoint, Conversation
from headwater.server.requests.normal_form import Message, is_tool_response

REASONING, ANSWER, QUESTION = "Hm, thus.", "Quite so.", "Quick, why?"  # texts that probes put into a conversation
PROBE_TEXTS = ("Quick, why?", "zigzag?")  # for a message: one of them begins with another character
# likewise for the tools after a breakpoint
PROBE_TOOL = {"type": "function", "function": {"name": "zigzag", "parameters": {"type": "object", "properties": {}}}}
TAIL_CHARACTERS = 200  # of the prompt, in which an open reasoning tag is searched
OPEN_REASONING = re.compile(r"<(\w*think\w*)>\s*\Z")  # a generation prompt that leaves the reasoning open


class ChatPrompter:
    """Builder of prompts from conversations. Thread safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        encoder: SegmentEncoder | None = None,
        billing: bool = False,
    ) -> None:
        """`billing`: lines for a provider's accounting stay in the system's text."""
        self._encoder = SegmentEncoder(tokenizer) if encoder is None else encoder
        self._template = template.replacing(self._encoder.separator, Edge.SEPARATOR.value)
        self.rules, self._form = rules_of(template, billing), call_form_of(template)
        self._thought_field = self.rules.thought_field if template.mentions(self.rules.thought_field) else None
        self._describes = needs_descriptions(template)
        self.written = WrittenCalls()
        self.writes_space = writes_space(template)

    def prepare(self, conversation: Conversation, namespace: str = "") -> Generation:
        """Return a generation of default sampling with the prompt, its boundaries and segments, and `keep_output`.

        Raises TemplateError if the template refuses the conversation itself; probes may fail. Text that was tokenised
        before for this namespace is not tokenised again.
        """
        conversation = marked(self._with_written(conversation, namespace), self._encoder.separator)
        try:
            text = self._render(conversation, generate=True)
        except TemplateError as error:
            raise TemplateError(f"{error}{self._blamed(conversation)}") from error
        encoded = self._encoder.encode(text, rendered_marks(text), namespace)
        probed = self._probe(conversation, text, encoded)
        boundaries, kept = probed
        prompt = Generation(encoded.ids, SamplingParams(), namespace, boundaries, segments=encoded.segments)
        return replace(prompt, keep_output=kept, messages=message_places(conversation, text, encoded))

    def _with_written(self, conversation: Conversation, namespace: str) -> Conversation:
        """Add the texts of calls that are known as the model wrote them, if the template writes calls in one form."""
        if self._form is None:
            return conversation
        found = {i: self.written.find(namespace, one) for i, one in enumerate(conversation.messages)}
        return replace(conversation, written={i: text for i, text in found.items() if text is not None})

    def _render(self, conversation: Conversation, generate: bool) -> str:
        """Render a conversation with the calls as the model wrote them, where they are known."""
        if conversation.written and self._form is not None:
            text = spliced(self._rendered(with_stand_ins(conversation), generate), conversation, self._form)
            if text is not None:
                return text
        return self._rendered(conversation, generate)

    def _rendered(self, conversation: Conversation, generate: bool) -> str:
        tools = described(conversation.tools) if conversation.tools and self._describes else conversation.tools
        variables = {**conversation.variables, "tools": tools, "add_generation_prompt": generate}
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
        """Return documents for a template that reads them, with their texts as segments unless it writes separators."""
        if self._template.mentions(Edge.SEPARATOR.value):
            return list(conversation.documents)
        return [{**document, "text": as_segment(document["text"])} for document in conversation.documents]

    def _probe(self, conversation: Conversation, text: str, encoded: Encoded) -> tuple[Boundaries, bool]:
        user_turns = [i for i, m in enumerate(conversation.messages) if m["role"] == "user"]
        queries = queries_of(conversation)
        answer, begun = dummy_answer(text, self._thought_field)
        nexts = [self._try_render(longer) for longer in next_turns(conversation, answer)]

        def boundary(probe: str | None) -> int | None:
            if probe is None or probe == text:
                return None
            # one token less: the end of the last one may depend on the text after it
            return max(0, bisect_right(encoded.ends, common_prefix(text, probe)) - 1)

        first = self._replaced(conversation, user_turns[:1])
        last = first if queries[-1:] == user_turns[:1] else self._replaced(conversation, queries[-1:])
        # a template may put a space before an answer that has none, since its model begins answers with one
        kept = [rendered.startswith((text + begun, f"{text} {begun}")) for rendered in nexts if rendered is not None]
        marked = {(at, ttl) for probe, ttl in self._marked(conversation) if (at := boundary(probe)) is not None}
        parts = Boundaries(
            system_end=boundary(first),
            query_start=boundary(last),
            query_end=boundary(nexts[0]),
            extra=tuple(sorted({at for at, _ in marked})),
            retained=tuple(sorted(Retention(at, ttl) for at, ttl in marked if ttl is not None)),
        )
        return parts, not kept or any(kept)

    def _replaced(self, conversation: Conversation, which: list[int]) -> str | None:
        """Render the conversation with that message's content replaced, None without such a message."""
        return self._try_render(with_content(conversation, which[0], stand_in_for), generate=True) if which else None

    def _marked(self, conversation: Conversation) -> Iterator[tuple[str | None, float | None]]:
        """Render the conversation once for each breakpoint, with another text after it; yield its time to live, too."""
        for point in conversation.breakpoints:
            changed = with_content(conversation, point.message, partial(cut_at, point))
            yield self._try_render(changed, generate=True), point.ttl
        for after in conversation.tool_breakpoints:
            tools = [*(conversation.tools or ())[: after.tool + 1], PROBE_TOOL]
            yield self._try_render(replace(conversation, tools=tools), generate=True), after.ttl

    def _blamed(self, conversation: Conversation) -> str:
        """Return the end of an error that names the first message which the template refuses, if one does."""
        taken = bisect_left(
            range(1, len(conversation.messages)),
            True,
            key=lambda n: self._try_render(replace(conversation, messages=conversation.messages[:n]), True) is None,
        )
        if len(conversation.messages) < 2 or taken == 0:
            return ""
        number, role = conversation.numbers[taken], conversation.messages[taken]["role"]
        return f" (message {number}, of role {role!r}, is the first that it refuses)"

    def _try_render(self, conversation: Conversation, generate: bool = False) -> str | None:
        try:
            return self._render(conversation, generate)
        except TemplateError:
            return None


def message_places(conversation: Conversation, text: str, encoded: Encoded) -> tuple[tuple[int, int], ...]:
    """Return the token at which each message's content begins, with the client's number of the message.

    Messages without a content, and those whose content a template changes, belong to the message before them.
    """
    places, at = [], 0
    for message, origin in zip(conversation.messages, conversation.numbers, strict=True):
        content = message["content"].strip()
        start = text.find(content, at) if content else -1
        if start >= 0:
            places.append((bisect_right(encoded.ends, start), origin))
            at = start + len(content)
    return tuple(places)


def queries_of(conversation: Conversation) -> list[int]:
    """Return the numbers of the messages with a user's query."""
    messages = enumerate(conversation.messages)
    return [i for i, m in messages if m["role"] == "user" and not is_tool_response(m["content"])]


def with_documents(conversation: Conversation) -> list[Message]:
    """Put the documents before the last query, for a template that reads none. Titles belong to the segments."""
    messages, queries = list(conversation.messages), queries_of(conversation)
    if not queries:
        sent = f"{len(conversation.documents):,} documents go before the user's last message"
        raise TemplateError(f"{sent}, but none of the {len(messages):,} messages is a user's")
    last = messages[queries[-1]]
    titled = (f"{one['title']}\n{one['text']}" if one.get("title") else one["text"] for one in conversation.documents)
    written = [as_segment(f"{text}\n\n") for text in titled]
    messages[queries[-1]] = {**last, "content": "".join([*written, last["content"]])}
    return messages


def dummy_answer(prompt: str, thought_field: str | None) -> tuple[Message, str]:
    """Return an answer like the model's, and the text that it begins with.

    It has reasoning first, if the generation prompt leaves that open: in a field, as clients send it, or in its text.
    """
    tag = OPEN_REASONING.search(prompt[-TAIL_CHARACTERS:])
    if tag and thought_field:
        return {"role": "assistant", "content": ANSWER, thought_field: REASONING}, REASONING
    text = f"{REASONING}\n</{tag[1]}>\n\n{ANSWER}" if tag else ANSWER
    return {"role": "assistant", "content": text}, text


def with_content(conversation: Conversation, number: int, changed: Callable[[str], str]) -> Conversation:
    """Change the content of one message."""
    messages = list(conversation.messages)
    messages[number] = {**messages[number], "content": changed(messages[number]["content"])}
    return replace(conversation, messages=tuple(messages))


def stand_in_for(text: str) -> str:
    """Return a text that begins unlike this one."""
    return PROBE_TEXTS[text.strip()[:1] == PROBE_TEXTS[0][0]]


def cut_at(point: Breakpoint, content: str) -> str:
    """Replace the content after a breakpoint by a text that begins unlike it."""
    return content[: point.characters] + stand_in_for(content[point.characters :])


def next_turns(conversation: Conversation, answer: Message) -> list[Conversation]:
    """Append possible next turns: a user's, and a tool's if there are tools."""
    turns: list[Message] = [{"role": "user", "content": QUESTION}]
    if conversation.tools:
        turns.append({"role": "tool", "content": QUESTION, "tool_call_id": "call"})
    return [replace(conversation, messages=(*conversation.messages, answer, turn)) for turn in turns]
