"""The manual lists each metric, miss reason, error code and command that exists, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from headwater.account import Reason
from headwater.cli import commands
from headwater.server.http.errors import KINDS
from headwater.server.observe.metrics import Metrics
from tests.server.fake_engine import FakeEngine

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def section(page: str, title: str) -> str:
    """Return the text of one section of a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_metrics_page_lists_each_metric():
    families = Metrics("m", FakeEngine().stats, 1, ("float32", "int8")).registry.collect()
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    rows = [line for line in section("metrics.md", "Metrics").splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(headwater_\w+)(?:\{[\w,]+\})?`", "\n".join(rows))) == names


def test_trouble_page_lists_each_miss_reason():
    rows = re.findall(
        r"^\| `(\w+)` \| .+ \| .+ \|$", section("trouble.md", "Why a request missed, and what to do"), re.M
    )
    assert sorted(rows) == sorted(Reason)


def test_trouble_page_lists_each_error_code():
    rows = re.findall(r"^\| (\d{3}) `(\w+)` \|", section("trouble.md", "Errors"), re.M)
    codes = {(str(kind.status), kind.code) for kind in KINDS.values()}
    without_a_class = {
        ("401", "invalid_api_key"),
        ("403", "host_not_allowed"),
        ("408", "request_timeout"),
        ("500", "internal_error"),
        ("503", "too_many_connections"),
    }
    assert set(rows) == codes | without_a_class


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_commands_in_examples_exist(page: Path):
    known = set(typer.main.get_command(commands).commands)
    assert set(re.findall(r"^(?:\S+/)?headwater ([a-z]+)", page.read_text(encoding="utf-8"), re.M)) <= known
