"""HTML and SVG as values: text that is not markup yet is escaped when it becomes a part of some."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

VOID = frozenset({"meta", "link", "input", "br"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | Iterable[str]
Attribute = str | float | bool | None


def tag(name: str, *children: Child, **attributes: Attribute) -> Markup:
    """An element. `class_` is class, `data_tip` data-tip; None and False leave an attribute out, True has no value."""
    named = "".join(map(_attribute, attributes, attributes.values()))
    if name in VOID:
        return Markup(f"<{name}{named}>")
    return Markup(f"<{name}{named}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """One after the other; plain strings are escaped."""
    return Markup("".join(_text(child) for child in children))


def _text(child: Child) -> str:
    if isinstance(child, Markup):
        return child
    return escape(child) if isinstance(child, str) else "".join(map(_text, child))


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
