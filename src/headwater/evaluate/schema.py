"""Whether a value fits a JSON schema: the words of it that tools use for their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: _number(value) and (isinstance(value, int) or value.is_integer()),
    "number": _number,
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "null": lambda value: value is None,
}


def misfit(value: Any, schema: Json | bool, name: str) -> str | None:
    """Where the value does not fit, and why; None if it does. Looks at types, enums, and what objects and lists hold.

    Other words of JSON schema are not looked at. `true` and `{}` fit anything, `false` fits nothing.
    """
    if not isinstance(schema, dict):
        return f"{name} may not be there" if schema is False else None
    types = schema.get("type", list(TYPES))
    types = [types] if isinstance(types, str) else types
    if not any(TYPES[one](value) for one in types if one in TYPES):
        return f"{name} is {value!r}, must be {' or '.join(types)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{name} is {value!r}, must be one of {', '.join(map(repr, schema['enum']))}"
    if isinstance(value, dict):
        return _misfit_of_object(value, schema, name)
    if isinstance(value, list) and "items" in schema:
        misfits = (misfit(entry, schema["items"], f"{name}[{i}]") for i, entry in enumerate(value))
        return next((found for found in misfits if found), None)
    return None


def _misfit_of_object(value: Json, schema: Json, name: str) -> str | None:
    properties = schema.get("properties", {})
    for required in schema.get("required", ()):
        if required not in value:
            return f"{name}.{required} is missing"
    for key, entry in value.items():
        if key in properties:
            found = misfit(entry, properties[key], f"{name}.{key}")
        else:
            found = f"{name}.{key} is not in the schema" if schema.get("additionalProperties") is False else None
        if found:
            return found
    return None
