"""Cells of a parametrised test that `make test` runs: few, among which all pairs of values of two parameters are.

A test that is marked with `pairs` leaves its other cells to `make test-full`. Where a parameter's values are named
"KIND, SHAPE", as recurrent layers are, `pairs(kinds="mixer")` keeps each of its values, and all pairs with its kinds.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from itertools import combinations

import pytest
from _pytest.mark import ParameterSet


def cells(values: Iterable[object], is_quick: Callable[..., bool]) -> list[ParameterSet]:
    """Return the values of a test's parameter, or of several; those that are not quick are part of `make test-full`."""
    tuples = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*cell, marks=[] if is_quick(*cell) else [pytest.mark.full]) for cell in tuples]


def covering(cells: Sequence[Set[Hashable]]) -> set[int]:
    """Return the places of cells that have all elements of all of them: in turn the first that adds most."""
    missing, kept = set().union(*cells), set()
    while missing:
        best = max(range(len(cells)), key=lambda at: len(cells[at] & missing))
        kept.add(best)
        missing -= cells[best]
    return kept


def pairs_of(values: Mapping[str, Hashable], kinds: str | None = None) -> set[Hashable]:
    """Return the pairs of a cell's values, by the names of their parameters, or its one value.

    Of the parameter `kinds`, the value itself is an element, and pairs are of the kind that it is named by.
    """
    values, elements = dict(values), set()
    if kinds is not None:
        elements.add(values[kinds])
        values[kinds] = str(values[kinds]).partition(",")[0]
    named = sorted(values.items(), key=lambda item: item[0])
    return elements.union(combinations(named, 2) if len(named) > 1 else named)


def leave_to_full(items: Sequence[pytest.Item]) -> None:
    """Mark as `full` the cells of tests with `pairs` that are not needed to cover them."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        marked = isinstance(item, pytest.Function) and item.get_closest_marker("pairs")
        if marked and not item.get_closest_marker("full"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cells in tests.values():
        kinds = cells[0].get_closest_marker("pairs").kwargs.get("kinds")
        kept = covering([pairs_of(_values(cell, kinds), kinds) for cell in cells])
        for at, cell in enumerate(cells):
            if at not in kept:
                cell.add_marker(pytest.mark.full)


def _values(cell: pytest.Function, kinds: str | None) -> dict[str, Hashable]:
    """Return a cell's values; objects of any type are told apart by their identity."""
    params = cell.callspec.params if hasattr(cell, "callspec") else {}
    return {name: value if name == kinds else id(value) for name, value in params.items()}
