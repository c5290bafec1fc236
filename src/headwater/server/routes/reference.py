"""Endpoint /docs: a page about the API, written from /openapi.json, that loads nothing from other hosts."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse

from headwater.server.routes.observe import PAGE_HEADERS
from headwater.server.routes.service import json_routes

Json = dict[str, Any]

REFERENCES = "#/components/schemas/"
HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Headwater: API</title><link rel="icon" href="/page/icon.svg"><link rel="stylesheet" href="/page/page.css">
<header><h1>Headwater: API</h1></header><main>
<section><p>Each path with the fields that it reads. <a href="/openapi.json">/openapi.json</a> has the same for
programs, such as a viewer or a generator of clients.</p></section>
"""


router = json_routes()


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    described = request.app.openapi()
    schemas = described.get("components", {}).get("schemas", {})
    sections = (
        section(f"{method.upper()} {path}", operation, schemas)
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
    )
    return HTMLResponse(HEAD + "".join(sections) + "</main></html>", headers=PAGE_HEADERS)


def section(title: str, operation: Json, schemas: Json) -> str:
    """Return the HTML of one operation: its parameters and the fields of its body."""
    rows = [(one["name"], one["schema"], one.get("required", False)) for one in operation.get("parameters", ())]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        body = schemas.get(content["schema"].get("$ref", "").removeprefix(REFERENCES), {})
        needed = body.get("required", ())
        rows += [(name, schema, name in needed) for name, schema in body.get("properties", {}).items()]
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(type_of(schema))}</td><td>{'required' * needed}</td></tr>"
        for name, schema, needed in rows
    )
    table = f"<table><tr><th>field</th><th>type</th><th></th></tr>{cells}</table>" if rows else ""
    return f"<section><h2>{escape(title)}</h2>{table}</section>\n"


def type_of(schema: Json) -> str:
    """Return the type of a JSON schema in a few words."""
    return " or ".join(dict.fromkeys(_types(schema))) or "any"


def _types(schema: Json) -> Iterator[str]:
    if "$ref" in schema:
        yield schema["$ref"].removeprefix(REFERENCES)
    elif "anyOf" in schema:
        for part in schema["anyOf"]:
            yield from _types(part)
    elif "enum" in schema:
        yield from map(str, schema["enum"])
    elif schema.get("type") == "array":
        yield f"list of {type_of(schema.get('items', {}))}"
    elif schema.get("type") not in (None, "null"):
        bounds = [f"{word} {schema[key]:,}" for key, word in BOUNDS.items() if key in schema]
        yield " ".join([schema["type"], *bounds])


BOUNDS = {
    "exclusiveMinimum": "more than",
    "minimum": "from",
    "exclusiveMaximum": "less than",
    "maximum": "to",
    "minLength": "with at least",
}
