"""Generated manual pages, and the page of the lab."""

import json
import re
import subprocess
import sys
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
    assert set(re.findall(r"`((?:headwater|process)_\w+)(?:\{[\w,]+\})?`", "\n".join(rows))) == names


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
        ("429", "rate_limit_exceeded"),
        ("500", "internal_error"),
        ("503", "too_many_connections"),
    }
    assert set(rows) == codes | without_a_class


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_commands_in_examples_exist(page: Path):
    known = set(typer.main.get_command(commands).commands)
    assert set(re.findall(r"^(?:\S+/)?headwater ([a-z]+)", page.read_text(encoding="utf-8"), re.M)) <= known


PAGE = (Path(__file__).parents[1] / "docs" / "lab.md").read_text()


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    return code


def test_example_policy_has_at_most_twenty_lines() -> None:
    assert len([line for line in example().splitlines() if line.strip()]) <= 20


def test_example_policy_appears_in_replay_table(tmp_path: Path) -> None:
    script, trace, out = tmp_path / "deepest.py", tmp_path / "made.jsonl", tmp_path / "out.json"
    script.write_text(example())
    lines = []
    for at in range(40):
        tokens = list(range(1000 * (at % 7), 1000 * (at % 7) + 64 * (2 + at % 7)))
        lines.append(json.dumps({"t": at, "session": str(at), "input": tokens, "output": [at]}))
    trace.write_text("\n".join(lines))
    evictions = ["lru", f"{script}:Deepest", f"{script}:Deepest(floor=4096)"]
    command = [sys.executable, "-m", "headwater", "replay", str(trace), "--memory", "350MB", "--json", str(out)]
    done = subprocess.run([*command, "--eviction", ",".join(evictions)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["eviction"] for row in rows] == evictions
    hits = [row["hit_tokens"] for row in rows]
    assert hits[1] != hits[0], "a policy of its own evicts something else"
    assert "headwater / deepest.py:Deepest(floor=4096)" in done.stdout


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^headwater (\w+)", PAGE, re.MULTILINE))))
def test_command_on_lab_page_exists(command: str) -> None:
    names = {one.name or getattr(one.callback, "__name__", "") for one in commands.registered_commands}
    assert command in names
