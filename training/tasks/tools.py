"""Calls of stated tools with the values that a request names."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from training.tasks import smalltalk
from training.tasks.budget import TURN, Count
from training.tasks.conversation import Turn, assembled
from training.tasks.example import TOOL, Example, Message, Tool
from training.tasks.split import belongs, wordings
from training.tasks.words import Drawer

VERBS = "get find book send list play order open close start stop set move check print show cancel save"
NOUNS = "room ticket alarm lamp song message letter parcel meeting report table boat train map price lesson door"
PARAMETERS = {
    "town": "town",
    "person": "person",
    "sender": "person",
    "firm": "firm",
    "code": "code",
    "colour": "colour",
    "drink": "drink",
    "date": "date",
    "street": "street",
    "item": "goods",
    "count": int,
    "hours": int,
    "minutes": int,
    "number": int,
    "seats": int,
    "level": int,
}
ASK = wordings(
    "[|Please |Now |Could you please ][{v} the {n}|{v} a {n}] with {P}.",
    "[|Please |Now ][{v} the {n}|{v} a {n}]: {P}.",
    "[I want to|I need to] [{v} the {n}|{v} a {n}] with {P}.",
)
SYSTEMS = ("You are a helpful assistant.", "Call a tool when one is needed.", "")
DONE, FAILED = "Done.", "That did not work."
RESULTS = ((json.dumps({"status": "done"}), DONE), (json.dumps({"status": "error"}), FAILED))
TOOL_TOKENS, PARAMETER_TOKENS = 130, 90  # of an example, for each tool, and for each parameter of the largest one
CALLED = 0.72  # of turns; the others need no tool


@dataclass(frozen=True, slots=True)
class Stated:
    verb: str
    noun: str
    parameters: Mapping[str, Any]  # name -> value drawn for it

    @property
    def name(self) -> str:
        return f"{self.verb}_{self.noun}"

    def as_tool(self) -> Tool:
        properties = {
            name: {"type": "integer" if drawn is int else "string"} for name, drawn in self.parameters.items()
        }
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        description = f"{self.verb.capitalize()} the {self.noun}."
        function = {"name": self.name, "description": description, "parameters": schema}
        return {"type": "function", "function": function}


def draw_tools(drawer: Drawer, tokens: int) -> list[Stated]:
    """One to three tools, by the tokens of the example. A name is held out as a whole, its verb and noun are not."""
    rng = drawer.rng
    number = min(max(1, tokens // TOOL_TOKENS), rng.choices((1, 2, 3), (3, 4, 4))[0])
    tools: dict[str, Stated] = {}
    while len(tools) < number:
        parameters = min(max(1, tokens // PARAMETER_TOKENS), rng.choices((1, 2, 3), (3, 5, 3))[0])
        names = rng.sample(list(PARAMETERS), parameters)
        tool = Stated(rng.choice(VERBS.split()), rng.choice(NOUNS.split()), {name: PARAMETERS[name] for name in names})
        if belongs(tool.name, drawer.split):
            tools[tool.name] = tool
    return list(tools.values())


def call(name: str, arguments: Mapping[str, Any]) -> Message:
    function = {"name": name, "arguments": dict(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """The call as the chat template writes it."""
    written = json.dumps(dict(arguments), ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'


def requested(drawer: Drawer, tool: Stated) -> Turn:
    """A request that names all values, in any order."""
    rng = drawer.rng
    values = {
        name: int(drawer.draw("small")) if drawn is int else drawer.draw(drawn)
        for name, drawn in tool.parameters.items()
    }
    named = [f"{name} {value}" for name, value in values.items()]
    if rng.random() < 0.4:
        rng.shuffle(named)
    listed = ", ".join(named[:-1]) + " and " + named[-1] if len(named) > 1 else named[0]
    asked = rng.choice(ASK[drawer.split]).replace("{v}", tool.verb).replace("{n}", tool.noun).replace("{P}", listed)
    after: tuple[Message, ...] = ()
    if rng.random() < 0.4:
        result, answer = RESULTS[rng.random() < 0.2]
        after = ({"role": "tool", "content": result}, {"role": "assistant", "content": answer})
    text = asked[:1].upper() + asked[1:]
    return Turn(text, call(tool.name, values), TOOL, (call_text(tool.name, values),), after)


def draw(rng: random.Random, tokens: int, split: str, count: Count) -> Example:
    drawer = Drawer(rng, split)
    tools = draw_tools(drawer, tokens)
    turns: list[Turn] = []
    left = tokens
    while left > 0:
        wanted = rng.random() < CALLED or not turns
        turn = requested(Drawer(rng, split), rng.choice(tools)) if wanted else smalltalk.draw(drawer)
        left -= count(turn.user) + 2 * TURN
        turns.append(turn)
    return assembled(TOOL, rng.choice(SYSTEMS), turns, (tokens, count), [tool.as_tool() for tool in tools])
