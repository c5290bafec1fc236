"""No module of headwater imports itself through others, at module level, in a function, or for type checking alone."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def cycle(imports: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, or an empty list."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("headwater")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 100
    assert cycle(imports) == []


@pytest.mark.parametrize("imports", [{"a": {"b"}, "b": {"c"}, "c": {"a"}}, {"a": {"a"}}])
def test_a_circle_is_found(imports: dict[str, set[str]]) -> None:
    assert cycle(imports)
