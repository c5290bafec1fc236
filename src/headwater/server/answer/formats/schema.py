"""What a JSON schema says of a value's type, for formats that write values without saying what they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

MAX_DEPTH = 16  # of references and alternatives; deeper ones allow anything
ANY = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
NOTHING: Schema = {}  # one object, so that it can be told by its identity
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates write them that print values
NAMES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object", list: "array"
}  # fmt: skip


def property_schema(schema: Schema, name: str) -> Any:
    """The schema of a property; {} where nothing is said of it."""
    properties = resolved(schema, schema).get("properties")
    return properties.get(name, {}) if isinstance(properties, Mapping) else {}


def resolved(schema: Any, root: Schema) -> Schema:
    """The schema itself, or what its reference within `root` leads to; NOTHING for what is no schema."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return NOTHING
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        target: Any = root
        for step in reference.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, Mapping) else None
        schema = target
    return NOTHING


def types_of(schema: Any, root: Schema) -> frozenset[str]:
    """The JSON types that a schema allows, as far as it says so plainly. Linear in the size of `root`."""
    return _types_of(schema, root, {}, 0)


def _types_of(schema: Any, root: Schema, known: dict[int, frozenset[str]], depth: int) -> frozenset[str]:
    """`known`: of schemas that were met already, by identity: references may meet the same one any number of times."""
    schema = resolved(schema, root)
    if depth > MAX_DEPTH:
        return ANY
    if id(schema) not in known:
        known[id(schema)] = ANY  # for who asks while it is looked at: it refers to itself
        known[id(schema)] = _said(schema, root, known, depth)
    return known[id(schema)]


def _said(schema: Schema, root: Schema, known: dict[int, frozenset[str]], depth: int) -> frozenset[str]:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(NAMES.get(type(value), "string") for value in values)
    said = schema.get("type")
    if isinstance(said, str):
        return frozenset({said})
    if isinstance(said, list):
        return frozenset(t for t in said if isinstance(t, str))
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(word), list) and parts:
            sets = [_types_of(part, root, known, depth + 1) for part in parts]
            return frozenset.intersection(*sets) if word == "allOf" else frozenset.union(*sets)
    return ANY


def encoded(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that stands there as bare text: a string, unless it reads as another type that is allowed."""
    bare = PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        name = NAMES[type(decoded(bare))]
    except ValueError:
        name = "string"
    if name != "string" and (name in types or (name == "integer" and "number" in types)):
        return bare
    return json.dumps(text, ensure_ascii=False)


def decoded(text: str) -> Any:
    """The value of a JSON text; raises ValueError where it is none (NaN is none)."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
