"""Cells that `make test` runs of a matrix: all pairs of values are among them, and few more."""

from itertools import combinations, product

import pytest

from tests.covering import covering, pairs_of


def cells_of(*sizes: int) -> list[dict[str, int]]:
    names = [chr(ord("a") + at) for at in range(len(sizes))]
    return [dict(zip(names, places, strict=True)) for places in product(*map(range, sizes))]


@pytest.mark.parametrize("sizes", [(3,), (4, 6), (2, 3, 4), (2, 3, 6, 4), (2, 3, 6, 2, 2)])
def test_every_pair_of_values_is_in_a_cell_that_is_kept(sizes: tuple[int, ...]) -> None:
    cells = cells_of(*sizes)
    kept = [cells[at] for at in covering([pairs_of(cell) for cell in cells])]
    for one, other in combinations(cells[0], 2):
        seen = {(cell[one], cell[other]) for cell in kept}
        assert seen == {(cell[one], cell[other]) for cell in cells}
    assert len(kept) == max(a * b for a, b in combinations((*sizes, 1), 2)), "no fewer have them all"


def test_the_same_cells_are_kept_each_time() -> None:
    cells = [pairs_of(cell) for cell in cells_of(3, 5, 4)]
    assert covering(cells) == covering(cells)


def test_pairs_that_a_matrix_lacks_are_not_asked_for() -> None:
    cells = [cell for cell in cells_of(2, 3, 3) if cell["a"] == 0 or cell["b"] != 2]
    kept = [cells[at] for at in covering([pairs_of(cell) for cell in cells])]
    assert {(cell["a"], cell["b"]) for cell in kept} == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)}


def test_covering_keeps_each_shape_and_all_pairs_of_each_kind() -> None:
    shapes = ["gla, square", "gla, odd", "gla, one head", "mamba, small"]
    cells = [(shape, length) for shape in shapes for length in range(4)]
    kept = [cells[at] for at in covering([pairs_of({"mixer": s, "length": n}, "mixer") for s, n in cells])]
    assert {shape for shape, _ in kept} == {*shapes}
    assert {(shape.partition(",")[0], n) for shape, n in kept} == {*product(("gla", "mamba"), range(4))}
    assert len(kept) == 8


@pytest.fixture(params=range(3))
def third(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.mark.pairs
@pytest.mark.parametrize("second", range(3))
@pytest.mark.parametrize("first", [0, 1, pytest.param(2, marks=pytest.mark.full)])
def test_cells_are_left_to_make_test_full(request: pytest.FixtureRequest, first: int, second: int, third: int) -> None:
    """Fixtures' parameters count. The cells of a value that was left to it before cover nothing in `make test`."""
    test = request.node.nodeid.partition("[")[0]
    cells = [item for item in request.session.items if item.nodeid.partition("[")[0] == test]
    quick = [item.callspec.params for item in cells if not item.get_closest_marker("full")]
    if request.config.option.markexpr == "full":  # quick cells are not among the session's items
        assert not quick
        return
    assert {(cell["second"], cell["third"]) for cell in quick} == {*product(range(3), repeat=2)}
    assert {cell["first"] for cell in quick} == {0, 1}
    assert len(quick) == 9
    assert len(cells) in (9, 27), "with `-m`, and without"
