"""Grammars in llguidance's dialect of Lark, built from rules, and the JSON schemas that they refer to.

To llguidance a token such as <think> is not text, whether the tokenizer calls it special or not: literals and regular
expressions never match it. A grammar has to name it, and so has to know which tags are tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import regex_to_lark
from tokenizers import Tokenizer

from headwater.request import Constraint
from headwater.server.requests.structured import LENIENT, quoted, without_annotations

Schema = Mapping[str, Any]

# White space as chat templates write it, so that the next turn's prompt repeats the generated text.
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

MAX_DEPTH = 16  # of references and alternatives; deeper ones allow any type
ALL_JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
NO_SCHEMA: Schema = {}  # compared by identity
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # written by templates that print Python values
TYPE_NAMES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object", list: "array"
}  # fmt: skip


class Grammar:
    """Collection of rules. Expressions are parts of rule bodies: a rule's name, a literal, `%json` with a schema."""

    def __init__(self, tag_tokens: Mapping[str, int], limits: Mapping[str, int] | None = None) -> None:
        """`tag_tokens`: ids of the tags that are tokens. `limits`: by such a tag, the most tokens before it."""
        self._tokens = tag_tokens
        self._limits = {tag: tokens for tag, tokens in (limits or {}).items() if tag in tag_tokens}
        self._rules: list[str] = []
        self._values: dict[tuple[str, str], str] = {}  # rules of bare values, by their ends

    def rule(self, body: str, lazy: bool = False) -> str:
        """Add a rule and return its name. A lazy rule is a regular expression that ends at its first match."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def tag(self, text: str) -> str:
        """Return an expression for a tag, as its token or spelled out."""
        return f"<[{self._tokens[text]}]>" if text in self._tokens else literal(text)

    def opening(self, text: str) -> str:
        """Return an expression for a tag at the start of an answer, before any text: as its token or spelled out."""
        spelled = self.rule(f"/{quoted(text)}/", lazy=True)
        return either([spelled, *([self.tag(text)] if text in self._tokens else [])])

    def text(self) -> str:
        """Add a rule for any text without tags that are tokens."""
        return self.rule("/(.|\\n)*/")

    def until(self, end: str) -> str:
        """Return an expression for any text up to and including the first `end`."""
        if end in self._limits:
            return f"{self.anything(end)} {self.tag(end)}"
        return f"{self.text()} {self.tag(end)}" if end in self._tokens else self._spelled(end)

    def anything(self, tag: str) -> str:
        """Return an expression for any text and tags, except `tag` as a token, within its limit of tokens."""
        if tag in self._limits:
            token = self.rule(f"<[^{self._tokens[tag]}]>")
            return self.rule(f"{token}{{0,{self._limits[tag]}}}" if self._limits[tag] else '""')
        others = sorted(id_ for text, id_ in self._tokens.items() if text != tag)
        text = self.rule("/(.|\\n)+/")
        return self.rule(f"({text} | <[{','.join(map(str, others))}]>)*" if others else f"{text}?")

    def anything_until(self, tag: str) -> str:
        """Return an expression for any text and tags up to and including the first `tag`, as its token or spelled."""
        if tag in self._limits:
            return self.until(tag)
        end = either([self._spelled(tag), *([self.tag(tag)] if tag in self._tokens else [])])
        return self.rule(f"{self.anything(tag)} {end}")

    def value(self, end: str, never: str) -> str:
        """Return an expression for any text up to and including the first `end`.

        No match of the regular expression `never` may end before the text does.
        """
        if (end, never) not in self._values:
            name = f"V{len(self._rules)}"
            self._rules.append(f"{name}: /(.|\\n)*{quoted(end)}/ & ~/(.|\\n)*({never})(.|\\n)+/")
            self._values[end, never] = self.rule(name, lazy=True)
        return self._values[end, never]

    def _spelled(self, end: str) -> str:
        """Return an expression for any text up to and including the first `end`, which is spelled out."""
        return self.rule(f"/(.|\\n)*{quoted(end)}/", lazy=True)

    def json(self, schema: Schema, strict: bool | None) -> str:
        """Return an expression for a JSON text that fits the schema; unless `strict`, unknown keywords are ignored."""
        options = {**SPACED, **({} if strict else LENIENT)}
        return f"%json {json.dumps({**without_annotations(schema), 'x-guidance': options})}"

    def fitting(self, constraint: Constraint) -> str:
        """Return an expression for texts that fit a constraint of the whole answer."""
        match constraint.kind:
            case "json_schema":
                return f"%json {constraint.source}"
            case "regex":
                return self.rule(f"/{regex_to_lark(constraint.source)}/")
        return self.rule(f"%lark {{\n{constraint.source}\n}}")

    def source(self, start: str) -> str:
        """Return the grammar whose start rule is the expression `start`."""
        return "\n".join([f"start: {start}", *self._rules])


def tag_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the tokens that llguidance does not treat as text."""
    added = tokenizer.get_added_tokens_decoder()
    return {t.content: i for i, t in added.items() if t.special or (t.content[:1] == "<" and t.content[-1:] == ">")}


def literal(text: str) -> str:
    """Return an expression for exactly this text."""
    return json.dumps(text)


def either(options: list[str]) -> str:
    """Return an expression for any one of the options."""
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def properties_of(schema: Schema) -> Schema:
    """Return the schemas of an object's properties, by name."""
    properties = resolved(schema, schema).get("properties")
    return properties if isinstance(properties, Mapping) else NO_SCHEMA


def property_schema(schema: Schema, name: str) -> Any:
    """Return the schema of a property, {} if there is none."""
    return properties_of(schema).get(name, {})


def resolved(schema: Any, root: Schema) -> Schema:
    """Follow the schema's references within `root`; return NO_SCHEMA for a value that is not one."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return NO_SCHEMA
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        target: Any = root
        for step in reference.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, Mapping) else None
        schema = target
    return NO_SCHEMA


def types_of(schema: Any, root: Schema) -> frozenset[str]:
    """Return the JSON types that a schema allows; any type if it names none. Linear in the size of `root`."""
    return _types_of(schema, root, {}, 0)


def _types_of(schema: Any, root: Schema, known: dict[int, frozenset[str]], depth: int) -> frozenset[str]:
    """`known` holds the types of visited schemas by identity: references may lead to one any number of times."""
    schema = resolved(schema, root)
    if depth > MAX_DEPTH:
        return ALL_JSON_TYPES
    if id(schema) not in known:
        known[id(schema)] = ALL_JSON_TYPES  # for references of the schema to itself
        known[id(schema)] = _named_types(schema, root, known, depth)
    return known[id(schema)]


def _named_types(schema: Schema, root: Schema, known: dict[int, frozenset[str]], depth: int) -> frozenset[str]:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(TYPE_NAMES.get(type(value), "string") for value in values)
    types = schema.get("type")
    if isinstance(types, str):
        return frozenset({types})
    if isinstance(types, list):
        return frozenset(t for t in types if isinstance(t, str))
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(word), list) and parts:
            sets = [_types_of(part, root, known, depth + 1) for part in parts]
            return frozenset.intersection(*sets) if word == "allOf" else frozenset.union(*sets)
    return ALL_JSON_TYPES


def encoded(text: str, types: frozenset[str]) -> str:
    """Encode a bare value as JSON: a string, unless it parses as another type that is allowed."""
    bare = PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        name = TYPE_NAMES[type(decoded(bare))]
    except ValueError:
        name = "string"
    if name != "string" and (name in types or (name == "integer" and "number" in types)):
        return bare
    return json.dumps(text, ensure_ascii=False)


def decoded(text: str) -> Any:
    """Return the value of a JSON text; raise ValueError if it is not valid JSON, or NaN."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
