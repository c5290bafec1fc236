"""The lab's page: its example of a policy is short, runs, and shows up in the table; its commands are there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.cli import commands

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
    evictions = ["lru", "deepest", "deepest(floor=4096)"]
    command = [sys.executable, str(script), "replay", str(trace), "--memory", "250MB", "--json", str(out)]
    done = subprocess.run([*command, "--eviction", ",".join(evictions)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["eviction"] for row in rows] == evictions
    hits = [row["hit_tokens"] for row in rows]
    assert hits[1] != hits[0], "a policy of its own evicts something else"
    assert "deepest" in done.stdout


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^headwater (\w+)", PAGE, re.MULTILINE))))
def test_command_on_lab_page_exists(command: str) -> None:
    names = {one.name or getattr(one.callback, "__name__", "") for one in commands.registered_commands}
    assert command in names
