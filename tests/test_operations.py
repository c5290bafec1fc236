"""The manual names every metric, reason and error that there is, and none that is not."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from headwater.account import Reason
from headwater.cli import commands
from headwater.server.http.errors import KINDS
from headwater.server.observe.metrics import Metrics
from tests.server.fake_engine import FakeEngine

ROOT = Path(__file__).parents[1]
MANUAL = (ROOT / "docs" / "operations.md").read_text()


def section(title):
    return MANUAL.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_metric_is_explained():
    families = Metrics("m", FakeEngine().stats, 1, ("float32", "int8")).registry.collect()
    there = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert set(re.findall(r"`(headwater_\w+)(?:\{[\w,]+\})?`", section("Reading the metrics"))) == there


def test_every_miss_reason_has_advice_in_the_manual():
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", section("Why a request missed, and what to do"), re.M)
    assert sorted(rows) == sorted(Reason)


def test_every_error_code_has_advice_in_the_manual():
    rows = re.findall(r"^\| (\d{3}) `(\w+)` \|", section("Troubleshooting"), re.M)
    codes = {(str(kind.status), kind.code) for kind in KINDS.values()}
    without_a_class = {
        ("401", "invalid_api_key"),
        ("403", "host_not_allowed"),
        ("408", "request_timeout"),
        ("500", "internal_error"),
        ("503", "too_many_connections"),
    }
    assert set(rows) == codes | without_a_class


def test_the_files_it_links_to_exist():
    for link in re.findall(r"\]\(([\w./-]+)\)", MANUAL):
        assert (ROOT / "docs" / link).exists(), link


def test_the_commands_it_shows_exist():
    known = {name for name in typer.main.get_command(commands).commands}
    assert set(re.findall(r"^headwater (\w+)", MANUAL, re.M)) <= known
