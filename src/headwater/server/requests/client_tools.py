"""Tools of the Responses API as functions that a template shows: namespaces, free-form tools, searches for tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headwater.server.http.errors import BadRequest, shown

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
