"""Keywords of schemas that the compiler of constraints can enforce, and those that it cannot."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from llguidance import LLMatcher

from headwater.engine.constraint import LIMITS

Schema = Mapping[str, Any]

# Keywords that the compiler does not know are ignored, and one of several alternatives may fit as well.
LENIENT: dict[str, Any] = {"lenient": True, "coerce_one_of": True}
PATTERN, WHOLE = "pattern", "the schema as a whole"
VALUES = ("enum", "const", "default", "examples")  # keywords whose values are not schemas
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


def compiled_schema(schema: Schema, options: Schema) -> Outcome:
    """Compile a schema with llguidance's options."""
    return compiled(LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": options})))


def as_far_as_possible(schema: Schema, options: Schema) -> tuple[Schema, tuple[str, ...]]:
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
