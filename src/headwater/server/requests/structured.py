"""Fields that constrain an answer, as vLLM and llama.cpp name them: schemas, regular expressions, choices, grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark
from pydantic import BaseModel, Field, model_validator

from headwater.engine.constraint import LIMITS
from headwater.errors import ConstraintError
from headwater.request import Constraint
from headwater.server.http.errors import BadRequest

# White space between the parts of a JSON, enough for pretty printing: without a bound a weak model never stops.
FLEXIBLE = {"whitespace_pattern": r"[ \n\t]{0,40}"}
COMPACT = {"whitespace_flexible": False}

# Limits of a grammar, whose conversion is quadratic in the number of rules and recursive in the nesting of groups.
MAX_GRAMMAR_CHARACTERS = 32 * 1024
MAX_RULES = 400
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
GRAMMAR_ESCAPES = frozenset('"\\[]^-/\n\r\t')  # characters that keep their escapes

Schema = str | dict[str, Any]  # a schema, or its JSON
JsonSchema = Mapping[str, Any]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, fail_fast=True)]

ABSENT = (None, False, "")  # values of fields that ask for nothing

# kind of constraint -> the field of `structured_outputs`, and the fields that other servers have for it
FIELDS: dict[str, tuple[str, ...]] = {
    "json": ("guided_json", "json_schema"),
    "json_object": ("guided_json_object",),
    "regex": ("guided_regex",),
    "choice": ("guided_choice",),
    "grammar": ("guided_grammar", "grammar"),
}

# Keywords that the compiler does not know are ignored, and one of several alternatives may fit as well.
LENIENT: dict[str, Any] = {"lenient": True, "coerce_one_of": True}
PATTERN, WHOLE = "pattern", "the schema as a whole"
VALUES = ("enum", "const", "default", "examples")  # keywords whose values are not schemas
# keywords of JSON Schema and OpenAPI: all others are the client's
STANDARD = frozenset({
    "$anchor", "$defs", "$dynamicAnchor", "$dynamicRef", "$id", "$ref", "$schema", "$vocabulary", "additionalItems",
    "additionalProperties", "allOf", "anyOf", "const", "contains", "contentEncoding", "contentMediaType",
    "contentSchema", "default", "definitions", "dependencies", "dependentRequired", "dependentSchemas", "deprecated",
    "discriminator", "else", "enum", "examples", "exclusiveMaximum", "exclusiveMinimum", "format", "if", "items",
    "maxContains", "maxItems", "maxLength", "maxProperties", "maximum", "minContains", "minItems", "minLength",
    "minProperties", "minimum", "multipleOf", "not", "nullable", "oneOf", "pattern", "patternProperties",
    "prefixItems", "properties", "propertyNames", "readOnly", "required", "then", "type", "unevaluatedItems",
    "unevaluatedProperties", "uniqueItems", "writeOnly",
})  # fmt: skip
ANNOTATIONS = ("description", "title", "examples", "$comment")
MAX_DEPTH = 32  # of schemas within schemas

UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: (\[.*\])")
# keywords by the beginnings of the compiler's messages about them, which also have values of the client's
ABOUT = {
    "regex": PATTERN,
    "Unknown format": "format",
    "Invalid type": "type",
    "type must": "type",
    "Pointer": "$ref",
    "Resource": "$ref",
    "oneOf": "oneOf",
}


class StructuredOutputs(BaseModel, strict=True, extra="forbid"):
    """Value of vLLM's `structured_outputs`: exactly one constraint, and the white space of a JSON."""

    schema_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None  # no effect: there is one compiler
    disable_additional_properties: Literal[False] | None = None
    structural_tag: None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if len(self.given) != 1:
            which = " and ".join(self.given) or "none"
            raise ValueError(f"{which} given, of {', '.join(FIELDS)} exactly one is needed")
        return self

    @property
    def given(self) -> dict[str, Any]:
        """The constraints that are given, by kind."""
        values = {kind: getattr(self, "schema_" if kind == "json" else kind) for kind in FIELDS}
        return {kind: value for kind, value in values.items() if value not in ABSENT}


class StructuredRequest(BaseModel):
    """Fields of a request that constrain its answer. At most one of them may be given."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: Schema | None = None
    grammar: str | None = None

    @property
    def answer_constraint(self) -> Constraint | None:
        """Constraint that the answer has to fit, None for any text.

        Raises BadRequest for two constraints or a schema that is not JSON, ConstraintError for an invalid grammar.
        """
        given = self._given()
        if len(given) > 1:
            raise only_one(*given)
        for param, (kind, value) in given.items():
            return MAKERS[kind](value, self._spacing(), param)
        return None

    def _given(self) -> dict[str, tuple[str, Any]]:
        """Return the kinds and values of the constraints that are given, by their places."""
        nested = {} if self.structured_outputs is None else self.structured_outputs.given
        found = {f"structured_outputs.{kind}": (kind, value) for kind, value in nested.items()}
        for kind, names in FIELDS.items():
            found |= {name: (kind, getattr(self, name)) for name in names}
        return {param: one for param, one in found.items() if one[1] not in ABSENT}

    def _spacing(self) -> Mapping[str, Any]:
        """Return llguidance's options for the white space of a JSON."""
        nested = self.structured_outputs
        pattern = self.guided_whitespace_pattern if nested is None else nested.whitespace_pattern
        if pattern is not None:
            return {"whitespace_pattern": pattern}
        return COMPACT if nested is not None and nested.disable_any_whitespace else FLEXIBLE


def only_one(first: str, second: str, *more: str) -> BadRequest:
    """Return the error for several constraints of one answer."""
    names = ", ".join((first, *more))
    return BadRequest(f"{second} is given, and {names}, too: an answer takes at most 1 constraint", second)


def schema_constraint(schema: Schema, spacing: Mapping[str, Any], param: str) -> Constraint:
    """Return a constraint to JSON texts that fit the schema; raises BadRequest for a text that is not a JSON object."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"{param} is a text that is not JSON: {error}", param) from error
        if not isinstance(schema, dict):
            raise BadRequest(f"{param} is the JSON of a {type(schema).__name__}, a schema is an object", param)
    return Constraint("json_schema", json.dumps({**schema, "x-guidance": spacing}), param)


def object_constraint(_: bool, spacing: Mapping[str, Any], param: str) -> Constraint:
    """Return a constraint to JSON objects."""
    return schema_constraint({"type": "object"}, spacing, param)


def regex_constraint(pattern: str, _: Mapping[str, Any], param: str) -> Constraint:
    """Return a constraint to texts that match as a whole, with or without the anchors ^ and $ around the pattern."""
    pattern = pattern.removeprefix("^")
    before = pattern.removesuffix("$")
    escaped = (len(before) - len(before.rstrip("\\"))) % 2 == 1
    return Constraint("regex", pattern if escaped else before, param)


def choice_constraint(choices: list[str], _: Mapping[str, Any], param: str) -> Constraint:
    """Return a constraint to one of the texts."""
    return Constraint("regex", "|".join(map(quoted, choices)), param)


def quoted(text: str) -> str:
    """Return the regular expression, without slashes around it, that matches exactly this text."""
    return "".join(c if c.isalnum() or c == "_" else f"\\x{{{ord(c):x}}}" for c in text)


def grammar_constraint(text: str, _: Mapping[str, Any], param: str) -> Constraint:
    """Return a constraint to a grammar in GBNF, or in llguidance's dialect of Lark.

    Raises ConstraintError for a text that is neither, or too long.
    """
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise ConstraintError(
            f"the grammar has {len(text):,} characters, at most {MAX_GRAMMAR_CHARACTERS:,} are accepted", param
        )
    rules = text.count("::=")
    if rules > MAX_RULES:
        raise ConstraintError(f"the grammar has {rules:,} rules, at most {MAX_RULES:,} are accepted", param)
    try:
        return Constraint("lark", any_to_lark(ESCAPE.sub(_decoded, text) if rules else text), param)
    except RecursionError as error:
        raise ConstraintError("the grammar's groups are nested too deep", param) from error
    except Exception as error:  # of whatever class the converter raises
        raise ConstraintError(f"the grammar is not valid GBNF: {error}"[:500], param) from error


def _decoded(escape: re.Match[str]) -> str:
    """Replace a character's code by the character: the converter takes leading zeros off codes."""
    code = escape[1] or escape[2] or escape[3]
    if code is None:
        return escape[0]
    number = int(code, 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise ValueError(f"{escape[0]} is not a character")
    character = chr(number)
    if character not in GRAMMAR_ESCAPES and character.isprintable():
        return character
    return RANGE_ESCAPES.get(character, f"\\x{number:02x}")


RANGE_ESCAPES = {'"': '\\"', "\\": "\\\\", "[": "\\[", "]": "\\]", "\n": "\\n", "\r": "\\r", "\t": "\\t"}

Maker = Callable[[Any, Mapping[str, Any], str], Constraint]
MAKERS: dict[str, Maker] = {
    "json": schema_constraint,
    "json_object": object_constraint,
    "regex": regex_constraint,
    "choice": choice_constraint,
    "grammar": grammar_constraint,
}


class Outcome(NamedTuple):
    """Outcome of compiling a grammar or schema."""

    message: str  # of the compiler; empty if it succeeded
    keywords: tuple[str, ...]  # keywords that are not enforced, or that made it fail


def compiled(grammar: str) -> Outcome:
    """Compile a grammar as `LLMatcher.grammar_from_lark` and its siblings return it. Takes about a millisecond."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    messages = [text.rpartition("failed to compile JSON schema: ")[2].partition("\n   1 | ")[0] for text in messages]
    keywords = dict.fromkeys(keyword for text in messages for keyword in _keywords(text))
    return Outcome(messages[0] if failed else "", tuple(keywords))


def _keywords(message: str) -> list[str]:
    if found := UNKNOWN_KEYWORDS.match(message):
        return [str(name) for name in json.loads(found[1])]
    return [next((keyword for start, keyword in ABOUT.items() if message.startswith(start)), WHOLE)]


def known_keywords(keywords: Iterable[str]) -> str:
    """Return keywords for the log: one that JSON Schema does not have is the client's, and not named."""
    return ", ".join(one if one in STANDARD or one == WHOLE else "an unknown keyword" for one in keywords)


def compiled_schema(schema: JsonSchema, options: JsonSchema) -> Outcome:
    """Compile a schema with llguidance's options."""
    return compiled(LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": options})))


def as_far_as_possible(schema: JsonSchema, options: JsonSchema) -> tuple[JsonSchema, tuple[str, ...]]:
    """Return the schema without what cannot be enforced even with LENIENT, and the keywords that are not enforced.

    An invalid schema is returned as it is, and refused when an engine compiles it.
    """
    outcome = compiled_schema(schema, {**options, **LENIENT})
    if PATTERN not in outcome.keywords:
        return schema, () if outcome.message else outcome.keywords
    kept = with_known_patterns(schema)
    return kept, (*outcome.keywords, *compiled_schema(kept, {**options, **LENIENT}).keywords)


def with_known_patterns(schema: Any, depth: int = 0) -> Any:
    """Return a schema without the patterns that the compiler cannot read, such as those that look ahead."""
    if depth > MAX_DEPTH:
        return schema
    if isinstance(schema, list):
        return [with_known_patterns(one, depth + 1) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == PATTERN and isinstance(value, str) and not _is_known(value):
            continue
        if key == "patternProperties" and isinstance(value, Mapping):
            value = {pattern: one for pattern, one in value.items() if _is_known(pattern)}
        kept[key] = value if key in VALUES else with_known_patterns(value, depth + 1)
    return kept


def without_annotations(schema: Any, depth: int = 0) -> Any:
    """Return a schema without its descriptions, which can be most of it and constrain nothing.

    A property of such a name is kept: its value is a schema.
    """
    if depth > MAX_DEPTH:
        return schema
    if isinstance(schema, list):
        return [without_annotations(one, depth + 1) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {k: v for k, v in schema.items() if k not in ANNOTATIONS or not isinstance(v, str | list)}
    return {k: v if k in VALUES else without_annotations(v, depth + 1) for k, v in kept.items()}


def _is_known(pattern: str) -> bool:
    return not compiled_schema({"type": "string", PATTERN: pattern}, {}).message
