"""The parts that all sections are made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from headwater.lab.report.markup import Child, Markup, tag
from headwater.lab.report.numbers import size
from headwater.lab.row import Result


def section(name: str, title: str, about: str, *body: Child, width: str = "full") -> Markup:
    """A card of the page."""
    heading = tag("h2", title, " ", tag("small", about), id=f"{name}-title")
    return tag("section", heading, *body, class_=width, id=name, aria_labelledby=f"{name}-title")


def empty(words: str) -> Markup:
    return tag("p", words, class_="empty")


def panels(figures: Iterable[Markup], kind: str = "") -> Markup:
    """Figures side by side, as many as there is room for."""
    return tag("div", figures, class_=f"panels {kind}".rstrip())


def panel(title: Child, *body: Child) -> Markup:
    return tag("figure", tag("figcaption", title), *body)


def figures(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """What a picture shows, to read and to copy."""
    columns = tag("tr", (tag("th", name, scope="col", class_="number" if i else None) for i, name in enumerate(head)))
    lines = (
        tag("tr", tag("th", row[0], scope="row"), (tag("td", value, class_="number") for value in row[1:]))
        for row in rows
    )
    table = tag("table", tag("thead", columns), tag("tbody", lines))
    scroll = tag("div", table, class_="scroll", tabindex=0, role="region", aria_label="Figures of this section")
    return tag("details", tag("summary", "As figures"), scroll)


def by_memory(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Results of each memory, from little to much."""
    grouped: dict[int, list[Result]] = defaultdict(list)
    for result in results:
        grouped[result.row.memory].append(result)
    return [(size(memory), grouped[memory]) for memory in sorted(grouped)]
