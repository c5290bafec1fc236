"""Values of a server's JSON: what it sends in the place of one that it should not is as good as nothing."""

from __future__ import annotations

from typing import Any


def object_of(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def list_of(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def text_of(value: object) -> str:
    return value if isinstance(value, str) else ""
