"""docs/families.md is what the code says, and the tests that it names are there."""

import re
from pathlib import Path

from benchmarks.families import page
from headwater.models.families import FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")


def test_the_page_is_made_from_the_code() -> None:
    assert page() == PAGE, "make families"


def test_the_tests_that_it_names_are_there() -> None:
    named = re.findall(r"`(tests/[^`]+)`", PAGE)
    assert named
    assert all((ROOT / name).is_file() for name in named)


def test_every_family_has_a_row_with_the_sizes_of_a_model() -> None:
    for family in FAMILIES:
        (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| {family.name} | `{family.model_types[0]}`"))
        assert family.profile in row
