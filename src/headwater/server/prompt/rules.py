"""Rules of a chat template for messages, found once by rendering small conversations and looking at the result."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from headwater.errors import TemplateError
from headwater.server.prompt.template import ChatTemplate, common_prefix
from headwater.server.prompt.written import CallForm
from headwater.server.requests.normal_form import EFFORTS, Message, MessageRules

NOW = datetime(2000, 1, 1)
# texts that no template writes by itself
RULE, QUERY, ANSWER, LATER, THOUGHT, CALL_ID = "Ruzavi.", "Quzopa?", "Anzeku.", "Lazemo.", "Thizato.", "functions.zig:7"
CALL_NAME = "zigato"
THOUGHT_FIELDS = ("reasoning_content", "thinking")
USUAL_EFFORTS = ("low", "medium", "high")
MAX_SEPARATOR_CHARACTERS = 8


def rules_of(template: ChatTemplate, billing: bool = False) -> MessageRules:
    """Return the rules of a template. `billing`: billing lines stay in the system's text."""
    probe = Probe(template)
    system, user, answer = message("system", RULE), message("user", QUERY), message("assistant", ANSWER)
    later = message("system", LATER)
    call = {"id": CALL_ID, "type": "function", "function": {"name": "zig", "arguments": {"a": "zag"}}}
    calling, result = message("assistant", "", tool_calls=[call]), message("tool", LATER, tool_call_id=CALL_ID)
    second = {"id": "functions.zig:8", "type": "function", "function": {"name": CALL_NAME, "arguments": {"a": "zag"}}}
    parallel = [user, message("assistant", "", tool_calls=[call, second]), result, result]
    thought_field = next((name for name in THOUGHT_FIELDS if probe.shows_thought(name)), THOUGHT_FIELDS[0])
    thinking = {**calling, thought_field: THOUGHT}
    return MessageRules(
        first_system=probe.shows(RULE, [system, user]),
        later_system=probe.shows(LATER, [system, user, answer, later, user])
        and probe.shows(LATER, [user, later, user]),
        developer=template.mentions("developer") and probe.shows(RULE, [message("developer", RULE), user]),
        merged_roles=tuple(
            one["role"]
            for one, turns in ((user, [user, user]), (answer, [user, answer, answer, user]))
            if probe.refuses(turns) and not probe.refuses([user])
        ),
        fills_turns=probe.refuses([user, calling, result, user]) and not probe.refuses([user, calling, result]),
        single_calls=not probe.shows(CALL_NAME, parallel) and probe.shows("zag", [user, calling, result]),
        opens_with_query=any(map(probe.refuses, ([system], [answer, user], [system, calling, result]))),
        separators={role: probe.separator(role) for role in ("system", "user", "assistant", "tool")},
        thought_field=thought_field,
        joins_thought=probe.refuses([user, {**thinking, "content": ANSWER}, result])
        and not probe.refuses([user, thinking, result]),
        shows_call_ids=template.mentions("<|tool_call_begin|>") and probe.shows(CALL_ID, [user, calling, result]),
        thinks_by_word=template.mentions("/no_think") and not template.reads("enable_thinking"),
        efforts=efforts_of(template),
        billing=billing,
    )


def efforts_of(template: ChatTemplate) -> tuple[str, ...]:
    """Return the levels of reasoning that a template knows: those that it names, or the usual ones for one default."""
    if not template.reads("reasoning_effort"):
        return ()
    named = (level for level in EFFORTS if template.mentions(f'"{level}"') or template.mentions(f"'{level}'"))
    found = tuple(named)
    return USUAL_EFFORTS if len(found) == 1 else found


def needs_descriptions(template: ChatTemplate) -> bool:
    """Return whether a template refuses tools with nothing but a name, the rest of which clients may leave out."""
    probe, user = Probe(template), message("user", QUERY)
    tool = {"type": "function", "function": {"name": CALL_NAME}}
    return probe.rendered([user], [tool]) is None and probe.rendered([user], described([tool])) is not None


def described(tools: Sequence[Any]) -> list[Any]:
    """Return tools, with an empty description and no parameters where there are none."""
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return [{**tool, "function": empty | tool["function"]} for tool in tools]


def message(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def call_form_of(template: ChatTemplate) -> CallForm | None:
    """Return the form in which a template writes a call without arguments; None if there is no such form."""
    probe = Probe(template)
    function = {"name": CALL_NAME, "arguments": {}}
    call = {"id": CALL_ID, "type": "function", "function": function}
    result, user = message("tool", LATER, tool_call_id=CALL_ID), message("user", QUERY)
    called = probe.rendered([user, message("assistant", "", tool_calls=[call]), result, user])
    said = probe.rendered([user, message("assistant", ANSWER), result, user])
    if called is None or said is None or called.count(CALL_NAME) != 1 or CALL_ID in called:
        return None
    before, _, after = said.partition(ANSWER)
    start = common_prefix(called, before)
    end = len(called) - common_prefix(called[start:][::-1], after[::-1])
    first, _, last = called[start:end].partition(CALL_NAME)
    return CallForm(first, last)


def writes_space(template: ChatTemplate) -> bool:
    """Return whether a template writes a space before an answer that the prompt does not end with.

    The model's answers begin with it.
    """
    probe, user = Probe(template), message("user", QUERY)
    prompt, said = probe.rendered([user]), probe.rendered([user, message("assistant", ANSWER), user])
    if prompt is None or said is None:
        return False
    return said.partition(ANSWER)[0].endswith(" ") and not prompt.endswith(" ")


class Probe:
    """Renderings of small conversations."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def rendered(self, messages: Sequence[Message], tools: list[Any] | None = None) -> str | None:
        """Render messages; None if the template refuses them."""
        try:
            return self._template.render(list(messages), NOW, {"add_generation_prompt": True, "tools": tools})
        except TemplateError:
            return None

    def shows(self, text: str, messages: Sequence[Message]) -> bool:
        return text in (self.rendered(messages) or "")

    def refuses(self, messages: Sequence[Message]) -> bool:
        return self.rendered(messages) is None

    def shows_thought(self, name: str) -> bool:
        """Return whether an answer's reasoning in the field `name` is shown, before a result of a tool."""
        call = {"id": CALL_ID, "type": "function", "function": {"name": "zig", "arguments": {"a": "zag"}}}
        answer = message("assistant", "", tool_calls=[call], **{name: THOUGHT})
        turns = [message("user", QUERY), answer, message("tool", LATER, tool_call_id=CALL_ID)]
        return self.shows(THOUGHT, turns)

    def separator(self, role: str) -> str:
        """Return the text that the template writes between two parts of a content; empty if it takes no parts."""
        parts = [{"type": "text", "text": text} for text in (RULE, LATER)]
        before = [] if role in ("system", "user") else [message("user", QUERY)]
        after = [message("user", QUERY)] if role in ("system", "assistant") else []
        text = self.rendered([*before, message(role, parts), *after]) or ""
        between = text.partition(RULE)[2].partition(LATER)
        separator = between[0] if between[1] else ""
        if len(separator) > MAX_SEPARATOR_CHARACTERS:
            return ""
        joined = self.rendered([*before, message(role, f"{RULE}{separator}{LATER}"), *after])
        return separator if joined == text else ""
