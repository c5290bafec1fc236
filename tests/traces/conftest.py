"""Fixtures of the tests of traces."""

import json
from array import array
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "../shared"


@pytest.fixture
def written(tmp_path):
    """Writes records, a JSON line each, or text as it is; gives the file."""

    def write(*records, name="some.jsonl"):
        lines = (one if isinstance(one, str) else json.dumps(one) for one in records)
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write


@pytest.fixture(scope="session")
def data():
    if not (SHARED / "data").is_dir():
        pytest.skip("no ../shared here")
    return SHARED / "data"


def tokens(*ids):
    return array("i", ids).tobytes()


def blocks(*ids):
    return array("q", ids).tobytes()
