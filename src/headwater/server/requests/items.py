"""Input items of the Responses API as chat messages: all kinds that Codex and OpenAI's Agents SDK send.

Items of kinds that this server never writes come from sessions that other models began. None of them is refused: calls
and their results become calls and results of functions, bookkeeping is left out, other items become a short text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, TypeAdapter, ValidationError

from headwater.server.http.errors import BadRequest, shown
from headwater.server.requests.chat import ChatMessage
from headwater.server.requests.normal_form import Message

Named = dict[str, Any]  # a name of a function, and the namespace that it belongs to
Place = tuple[int | str, ...]  # keys that lead to a value of the body

INPUT = "input"  # the one argument of a function that stands for a free-form tool
SEARCH = "tool_search"  # type of the client's search for tools, and name of the function that stands for it
FREE_FORM = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
FREE_FORM_NOTE = f"The argument `{INPUT}` is free-form text: it is passed on as it is, not as JSON."
# type of a tool that the client runs -> type of the item with its call
CALL_ITEMS = {"function": "function_call", "custom": "custom_tool_call", SEARCH: "tool_search_call"}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """Tool of a request, which the client runs unless it is a provider's. `sent` is its JSON."""

    sent: dict[str, Any]
    place: Place
    namespace: str | None = None

    @property
    def kind(self) -> str:
        return str(self.sent.get("type"))

    @property
    def run_by_client(self) -> bool:
        return self.kind in CALL_ITEMS and (self.kind != SEARCH or self.sent.get("execution") == "client")

    @property
    def named(self) -> Named:
        """Name of the tool as the client knows it."""
        name = SEARCH if self.kind == SEARCH else self.sent.get("name")
        return {"name": name} if self.namespace is None else {"name": name, "namespace": self.namespace}

    @property
    def has_grammar(self) -> bool:
        """True if the text of a free-form tool has a grammar."""
        form = self.sent.get("format")
        return self.kind == "custom" and isinstance(form, dict) and form.get("type") == "grammar"

    def function(self) -> dict[str, Any]:
        """Return the tool as chat completions write it. Raises BadRequest for an unknown format of a free-form tool."""
        own = {name: value for name, value in self.sent.items() if name != "type"}
        if self.kind == "custom":
            own = {"name": own.get("name"), "description": self._description(), "parameters": FREE_FORM}
        elif self.kind == SEARCH:
            own = {"name": SEARCH, "description": own.get("description"), "parameters": own.get("parameters")}
        if "name" in own:
            own["name"] = flat_name(self.named)
        return {"type": "function", "function": {name: value for name, value in own.items() if value is not None}}

    def _description(self) -> Any:
        """Return the description of a free-form tool, with the format of its text."""
        described, form = self.sent.get("description"), self.sent.get("format")
        texts = [FREE_FORM_NOTE] if described is None else [described, FREE_FORM_NOTE]
        match form:
            case None | {"type": "text"}:
                pass
            case {"type": "grammar", "syntax": "lark" | "regex" as syntax, "definition": str(definition)}:
                kind = "Lark grammar" if syntax == "lark" else "regular expression"
                texts.append(f"It has to match this {kind}:\n{definition}")
            case _:
                takes = "its type must be 'text', or 'grammar' with a definition and the syntax 'lark' or 'regex'"
                at = ".".join(map(str, (*self.place, "format")))
                raise BadRequest(f"format of a custom tool is {shown(form)}, {takes}", at)
        return "\n\n".join(texts) if all(isinstance(text, str) for text in texts) else described


def flat_tools(tools: Any, *place: int | str) -> Iterator[ClientTool]:
    """Yield each tool, also those of namespaces. Raises BadRequest for a namespace without tools."""
    for number, tool in enumerate(tools if is_list_of_objects(tools) else ()):
        if tool.get("type") != "namespace":
            yield ClientTool(tool, (*place, number))
            continue
        name, inner = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not is_list_of_objects(inner):
            at = ".".join(map(str, (*place, number)))
            raise BadRequest("tools has a namespace that lacks its name or its list of tools", at)
        yield from (ClientTool(one, (*place, number, "tools", i), name) for i, one in enumerate(inner))


def tools_of_search(item: dict[str, Any]) -> Iterator[ClientTool]:
    """Yield the tools in a search's result that the client runs. Invalid ones are left out."""
    try:
        yield from (tool for tool in flat_tools(item.get("tools")) if tool.run_by_client)
    except BadRequest:
        return


def flat_name(named: Named) -> Any:
    """Return the name of a function as the model sees it: with its namespace before it, if it has one."""
    name, namespace = named.get("name"), named.get("namespace")
    return f"{namespace}__{name}" if isinstance(namespace, str) and isinstance(name, str) else name


def is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


Checked = TypeVar("Checked")
Item = dict[str, Any]

# kinds without a text that a model should read
BOOKKEEPING = frozenset({
    "additional_tools", "compaction_trigger", "configuration_update", "ghost_snapshot", "mcp_approval_request",
    "mcp_list_tools",
})  # fmt: skip
COMPACTIONS = frozenset({"compaction", "compaction_summary", "context_compaction"})
# kinds of calls whose results are items of their own; another call without a `call_id` holds its result
CLIENT_CALLS = frozenset({
    "apply_patch_call", "computer_call", "custom_tool_call", "function_call", "local_shell_call", "shell_call",
    "tool_search_call",
})  # fmt: skip
ARGUMENT_FIELDS = ("arguments", "action", "operation")  # each holds all arguments of a call
RESULT_FIELDS = ("output", "outputs", "results", "result", "error")
# fields of a call that are neither arguments nor results
OTHER_FIELDS = frozenset({
    "type", "id", "call_id", "status", "name", "namespace", "server_label", "approval_request_id", "caller",
    "container_id", "environment", "execution", "fingerprint", "pending_safety_checks", "encrypted_content",
    "internal_chat_message_metadata_passthrough",
})  # fmt: skip
NO_RESULT = "[result left out]"  # of a call that ran at a provider
MAX_KIND_CHARACTERS = 64


class CallOutput(BaseModel):
    """Item with the output of a call; null or missing if there was none."""

    output: str | list[dict[str, Any] | str] | dict[str, Any] | None = None


class ReasoningItem(BaseModel):
    """Reasoning of an assistant. Encrypted reasoning is left out: only its author can read it."""

    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        texts = [part.get("text") for part in self.content or self.summary or ()]
        return "\n\n".join(text for text in texts if isinstance(text, str))


MESSAGE, OUTPUT, REASONING = TypeAdapter(ChatMessage), TypeAdapter(CallOutput), TypeAdapter(ReasoningItem)


def checked(adapter: TypeAdapter[Checked], value: Any, body: dict[str, Any], *place: int | str) -> Checked:
    """Validate a value; raise RequestValidationError if it is invalid, which names its place in the client's body."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        errors = [{**e, "loc": ("body", *place, *e["loc"])} for e in error.errors()]
        raise RequestValidationError(errors, body=body) from error


def messages_of(items: str | list[Item]) -> list[Message]:
    """Translate input items to messages: consecutive reasoning, text and calls of an assistant are one message.

    Raises BadRequest or RequestValidationError for an invalid item of a kind that this server writes.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    return translated(items).messages


def translated(items: list[Item]) -> Translation:
    """Translate input items as `messages_of` does, and note the item with which each message begins."""
    translation = Translation({"input": items})
    for number, item in enumerate(items):
        kind = kind_of(item)
        if not isinstance(kind, str):
            raise BadRequest(f"input has an item of type {shown(kind)}, it must be a text", f"input.{number}.type")
        translation.add(number, kind, item)
    return translation


def kind_of(item: Item) -> Any:
    """Return the type of an item, which messages and references to items may lack."""
    return item.get("type") or ("message" if "role" in item or "id" not in item else "item_reference")


class Translation:
    """Messages of the items so far."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.messages: list[Message] = []
        self.origins: list[int] = []  # of each message: the number of its first item
        self._body = body

    def add(self, number: int, kind: str, item: Item) -> None:
        """Add the next item."""
        self._add(number, kind, item)
        self.origins += [number] * (len(self.messages) - len(self.origins))

    def _add(self, number: int, kind: str, item: Item) -> None:
        if kind == "message":
            self._add_message(number, item)
        elif kind == "reasoning":
            self._add_reasoning(checked(REASONING, item, self._body, "input", number).text)
        elif kind == "agent_message":
            self._add_text("user", f"{item.get('author')}: {readable(item) or left_out(kind)}")
        elif kind.endswith("_output"):
            if kind in ("function_call_output", "custom_tool_call_output"):
                checked(OUTPUT, item, self._body, "input", number)
            self._add_result(item, output_of(kind, item))
        elif kind.endswith("_call") or kind == "program":
            self._add_call(kind, item)
        elif kind in COMPACTIONS:
            self._note(readable(item) or "[compaction left out: its text is encrypted]")
        elif kind == "mcp_approval_response":
            if item.get("approve") is False:
                self._note(f"[call not approved: {item.get('reason') or 'no reason is given'}]")
        elif kind not in BOOKKEEPING:
            self._note(left_out(kind))

    def _add_message(self, number: int, item: Item) -> None:
        role, content, last = item.get("role"), item.get("content"), self._last_answer()
        if role == "assistant" and last is not None and (last["content"] is None or "tool_calls" in last):
            if content is not None:
                own = {"role": role, "content": content}
                content = checked(MESSAGE, own, self._body, "input", number).content
                last["content"] = content if last["content"] is None else continued(last["content"], content)
            return
        own = {name: item[name] for name in ("role", "content") if name in item}
        message = checked(MESSAGE, own, self._body, "input", number)
        self.messages.append({"role": message.role, "content": message.content})

    def _add_reasoning(self, text: str) -> None:
        if text:
            self.messages.append({"role": "assistant", "content": None, "reasoning_content": text})

    def _add_call(self, kind: str, item: Item) -> None:
        last = self._last_answer()
        if last is None:
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        function = {"name": call_name(kind, item), "arguments": call_arguments(kind, item)}
        last.setdefault("tool_calls", []).append({"id": call_id(item), "type": "function", "function": function})
        if kind not in CLIENT_CALLS and item.get("call_id") is None:
            found = next((item[name] for name in RESULT_FIELDS if item.get(name) is not None), None)
            is_text = kind != "image_generation_call" and found is not None
            self._add_result(item, result_content(found) if is_text else NO_RESULT)

    def _add_result(self, item: Item, content: Any) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id(item), "content": content})

    def _last_answer(self) -> Message | None:
        """Return the last message if it is the assistant's."""
        return self.messages[-1] if self.messages and self.messages[-1]["role"] == "assistant" else None

    def _add_text(self, role: str, text: str) -> None:
        self.messages.append({"role": role, "content": text})

    def _note(self, text: str) -> None:
        """Append a text to the last message, or add a user's: a turn of its own could stand between call and result."""
        last: Message = self.messages[-1] if self.messages else {"role": None}
        if last["role"] not in ("user", "assistant", "tool"):
            self._add_text("user", text)
        elif before := parts_of(last["content"]):
            last["content"] = [*before, {"type": "text", "text": f"\n{text}"}]
        else:
            last["content"] = text


def parts_of(content: Any) -> list[dict[str, Any]]:
    """Return a content as parts."""
    if isinstance(content, list):
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return [{"type": "text", "text": content}] if content else []


def continued(content: Any, more: Any) -> Any:
    """Return a content and its continuation: one text if they meet in texts, so that no separator comes between."""
    before, after = parts_of(content), parts_of(more)
    if before and after and all(isinstance(part.get("text"), str) for part in (before[-1], after[0])):
        after[0] = {**after[0], "text": before.pop()["text"] + after[0]["text"]}
    return before + after


def left_out(kind: str) -> str:
    """Return the text that stands for an item."""
    return f"[{kind[:MAX_KIND_CHARACTERS]} left out]"


def readable(item: Item) -> str:
    """Return the texts of an item's content or summary, if any is not encrypted."""
    found: list[str] = []
    for value in (item.get("content"), item.get("summary"), item.get("text")):
        for part in value if isinstance(value, list) else [value]:
            text = part.get("text") if isinstance(part, dict) else part
            found += [text] if isinstance(text, str) and text else []
    return "\n\n".join(found)


def call_id(item: Item) -> Any:
    """Return the id that a call and its result share; local shells of older clients have no other than the item's."""
    return item.get("call_id") or item.get("id")


def call_name(kind: str, item: Item) -> Any:
    """Return the name of a called function as the model sees it."""
    if "name" in item or kind in ("function_call", "custom_tool_call"):
        return flat_name({"namespace": item.get("server_label"), **item})
    return kind.removesuffix("_call")


def call_arguments(kind: str, item: Item) -> Any:
    """Return the arguments of a call: JSON, or an object."""
    if kind == "custom_tool_call":
        return {INPUT: item.get("input")}
    if kind == "function_call":
        return item.get("arguments")
    whole = next((item[name] for name in ARGUMENT_FIELDS if item.get(name) is not None), None)
    if whole is None:
        whole = {name: value for name, value in item.items() if name not in OTHER_FIELDS and name not in RESULT_FIELDS}
    return {name: value for name, value in whole.items() if value is not None} if isinstance(whole, dict) else whole


def output_of(kind: str, item: Item) -> Any:
    """Return the content of an item with a call's result."""
    if kind == "tool_search_output":
        return "\n".join(json.dumps(tool.function(), ensure_ascii=False) for tool in tools_of_search(item))
    output = item.get("output", item.get("result"))
    if kind == "apply_patch_call_output":
        return ": ".join(text for text in (item.get("status"), output) if isinstance(text, str) and text)
    return result_content(output)


def result_content(value: Any) -> Any:
    """Return a call's result as the content of a message: a text, or parts some of which may have none."""
    parts = [result_part(one) for one in (value if isinstance(value, list) else [value])]
    if any(isinstance(part, dict) for part in parts):
        return [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    return "\n".join(parts)


def result_part(value: Any) -> Any:
    """Return one of a result's values as a text, or as a part that has a type."""
    match value:
        case None:
            return ""
        case str():
            return value
        case {"type": "logs", "logs": str(logs)}:
            return logs
        case {"stdout": stdout, "stderr": stderr}:
            return shell_text(str(stdout or ""), str(stderr or ""), value.get("outcome"))
        case {"filename": name, "text": str(text)}:
            return f"{name}\n{text}"
        case {"content": _}:
            return readable(value) or json.dumps(value, ensure_ascii=False)
        case {"type": str()}:
            return value
    return json.dumps(value, ensure_ascii=False)


def shell_text(stdout: str, stderr: str, outcome: Any) -> str:
    """Return what a command wrote, with its exit code if it failed."""
    texts = [text.removesuffix("\n") for text in (stdout, stderr) if text]
    match outcome:
        case {"type": "timeout"}:
            texts.append("[timed out]")
        case {"exit_code": int(code)} if code:
            texts.append(f"[exit code {code}]")
    return "\n".join(texts)
