"""A run of an evaluation: every item, asked of a server in each serving mode, and scored.

Scores are exact match and token F1 as of SQuAD (Rajpurkar et al. 2016, section 6.1), and those of tool calls.
"""

from __future__ import annotations

import importlib
import json
import re
import secrets
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from headwater.errors import ConfigError
from headwater.evaluate.items import Item, Json
from headwater.evaluate.modes import MODES, Asking
from headwater.evaluate.server import Answer, Server
from headwater.journal import Journal

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Score:
    """An answer's score. `f1` is None for tool calls, `well_formed` for all else."""

    exact: float  # 0 or 1
    f1: float | None = None
    well_formed: float | None = None  # 0 or 1


def score(item: Item, answer: Answer) -> Score:
    """Score an answer; a refusal or an error is wrong. Raises ConfigError for a tool call without jsonschema."""
    if item.kind != "tool":
        return Score(
            max(exact_match(answer.text, right) for right in item.answers) if answer.ok else 0.0,
            max(token_f1(answer.text, right) for right in item.answers) if answer.ok else 0.0,
        )
    call = next(iter(answer.calls), None) if answer.ok else None
    if call is None or malformed(call, item.tools) is not None:
        return Score(0.0, None, 0.0)
    return Score(float(is_right(call, item)), None, 1.0)


def normalised(text: str) -> str:
    """Lower the case, and remove punctuation, articles and extra spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, right: str) -> float:
    return float(normalised(answer) == normalised(right))


def token_f1(answer: str, right: str) -> float:
    """Return the harmonic mean of precision and recall of words; if one text has none, whether both have none."""
    ours, theirs = normalised(answer).split(), normalised(right).split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs))


def malformed(call: Json, tools: Iterable[Json]) -> str | None:
    """Return why a call, in the form of OpenAI's `function`, fits none of the tools; None if it fits one."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if call["name"] not in schemas:
        return f"name is {call['name']!r}, the tools are {', '.join(schemas)}"
    try:
        arguments = json.loads(call["arguments"])
    except (ValueError, RecursionError) as error:
        return f"arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return f"arguments are {arguments!r}, must be an object"
    return misfit(arguments, schemas[call["name"]], "arguments")


def misfit(value: Any, schema: Json | bool, name: str) -> str | None:
    """Return where and why a value violates its JSON schema (draft 2020-12), or None; no reference is fetched.

    A schema with an unknown type or reference is fitted by no value. Raises ConfigError if jsonschema is missing.
    """
    validator, registry, faults = _jsonschema()
    try:
        found = next(iter(validator(schema, registry=registry).iter_errors(value)), None)
    except faults as error:
        return f"{name} cannot be checked, the schema has an unknown type or reference: {type(error).__name__}"
    return None if found is None else f"{name}{found.json_path.removeprefix('$')}: {found.message}"


def require_jsonschema() -> None:
    """Raise ConfigError if jsonschema is not installed."""
    try:
        importlib.import_module("jsonschema")
    except ImportError as error:
        raise ConfigError("scores of tool calls need jsonschema: pip install 'headwater[eval]'") from error


def _jsonschema() -> tuple[Any, Any, tuple[type[Exception], ...]]:
    """Return the validator's class, an empty registry of schemas, and the errors of schemas that cannot be applied."""
    require_jsonschema()
    jsonschema, referencing = (importlib.import_module(name) for name in ("jsonschema", "referencing"))
    faults = (jsonschema.exceptions.UnknownType, referencing.exceptions.Unresolvable, RecursionError)
    return jsonschema.Draft202012Validator, referencing.Registry(), faults


def is_right(call: Json, item: Item) -> bool:
    """Return whether a well-formed call is the right call of the item."""
    right = item.call
    return right is not None and call["name"] == right.name and json.loads(call["arguments"]) == dict(right.arguments)


@dataclass(frozen=True, slots=True)
class Scored:
    """An item, an answer to it, and the answer's score."""

    item: Item
    answer: Answer
    score: Score


@dataclass
class Run:
    """All items under all modes. `at_once` groups are asked in parallel, the items of a group one after the other."""

    server: Server
    items: Sequence[Item]
    max_tokens: int = 128
    thinking: bool = False
    at_once: int = 1
    logprobs: bool = False  # request them, so that answers are compared by more than their text
    on_answer: Callable[[Answer], None] = lambda answer: None
    # answers of an earlier run, by mode and group
    journal: Journal = field(default_factory=lambda: Journal(None, None))
    name: str = field(default_factory=lambda: secrets.token_hex(8))

    def asked(self, modes: Sequence[str]) -> dict[str, list[Scored]]:
        """Ask every item in every mode. Returns the columns in order, each with the items in the file's order."""
        columns: dict[str, list[Scored]] = {}
        for mode in modes:
            answers = self._mode(mode)
            for column in MODES[mode].columns:
                columns[column] = [scored for scored in answers if scored.answer.column == column]
        return columns

    def fields(self, item: Item) -> Json:
        """Return the fields of an item's request that all modes share."""
        fields: Json = {
            "messages": list(item.messages),
            "max_tokens": self.max_tokens,
            "chat_template_kwargs": {"enable_thinking": self.thinking},
        }
        if item.tools:
            fields["tools"] = list(item.tools)
        if self.logprobs:
            fields["logprobs"] = True
        return fields

    def _mode(self, mode: str) -> list[Scored]:
        groups = [list(members) for _, members in groupby(enumerate(self.items), key=lambda pair: pair[1].group)]
        with ThreadPoolExecutor(self.at_once) as pool:
            done = list(pool.map(lambda group: self._group(mode, group), groups))
        return sorted((scored for group in done for scored in group), key=lambda scored: scored.answer.item)

    def _group(self, mode: str, group: Sequence[tuple[int, Item]]) -> list[Scored]:
        """Ask each item of a group, by its index in the file, in all rounds of the mode before the next item."""
        name = f"{mode}, {group[0][0]}"
        if name in self.journal:
            answers = [_kept(told) for told in self.journal[name]]
            for answer in answers:
                self.on_answer(answer)
        else:
            times = range(len(MODES[mode].columns))
            answers = [self._answer(mode, number, item, time) for number, item in group for time in times]
            if not any(answer.outcome == "error" for answer in answers):
                self.journal.add(name, [asdict(answer) for answer in answers])
        items = dict(group)
        return [Scored(items[one.item], one, score(items[one.item], one)) for one in answers]

    def _answer(self, mode: str, number: int, item: Item, time: int) -> Answer:
        added = MODES[mode].fields(Asking(item, number, time, self.name))
        answer = self.server.answer(number, MODES[mode].columns[time], {**self.fields(item), **added})
        self.on_answer(answer)
        return answer


def _kept(told: Json) -> Answer:
    """Return an answer from the journal's JSON."""
    logprobs = told["logprobs"]
    return Answer(**{**told, "calls": tuple(told["calls"]), "logprobs": None if logprobs is None else tuple(logprobs)})
