"""How right an answer is: exact match and token F1 as of SQuAD (Rajpurkar et al. 2016, section 6.1), and tool calls."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headwater.evaluate.answered import Answered
from headwater.evaluate.item import Item, Json
from headwater.evaluate.schema import misfit

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Score:
    exact: float  # 0 or 1
    f1: float | None = None  # None for tool calls
    well_formed: float | None = None  # 0 or 1; None for what is no tool call


def score(item: Item, answered: Answered) -> Score:
    """What was refused, or failed, is wrong."""
    if item.kind != "tool":
        return Score(
            max(exact_match(answered.text, right) for right in item.answers) if answered.ok else 0.0,
            max(token_f1(answered.text, right) for right in item.answers) if answered.ok else 0.0,
        )
    call = next(iter(answered.calls), None) if answered.ok else None
    if call is None or malformed(call, item.tools) is not None:
        return Score(0.0, None, 0.0)
    return Score(float(is_right(call, item)), None, 1.0)


def normalised(text: str) -> str:
    """Lower case, without punctuation and articles, one space between words."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, right: str) -> float:
    return float(normalised(answer) == normalised(right))


def token_f1(answer: str, right: str) -> float:
    """Harmonic mean of precision and recall of words; where one has no words, whether both have none."""
    ours, theirs = normalised(answer).split(), normalised(right).split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs))


def malformed(call: Json, tools: Iterable[Json]) -> str | None:
    """Why a call, as OpenAI writes its function, is none of these tools; None if it is one."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if call["name"] not in schemas:
        return f"name is {call['name']!r}, the tools are {', '.join(schemas)}"
    try:
        arguments = json.loads(call["arguments"])
    except (ValueError, RecursionError) as error:
        return f"arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return f"arguments are {arguments!r}, must be an object"
    return misfit(arguments, schemas[call["name"]], "arguments")


def is_right(call: Json, item: Item) -> bool:
    """Of a well-formed call: whether it is the item's."""
    right = item.call
    return right is not None and call["name"] == right.name and json.loads(call["arguments"]) == dict(right.arguments)
