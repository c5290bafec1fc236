"""The table of promises names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "README.md").read_text())


def test_the_readme_names_tests():
    assert len(NAMED) > 10


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_a_promise_is_kept_by_a_test_that_exists(file, test):
    text = (ROOT / file).read_text()
    assert f"def {test}(" in text if test else "def test_" in text
