"""The client's commands with a real server of the embedded model, and the doctor on this machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from tests.forked import PATIENCE, headwater

LINE = "the quiet river flows under the old stone bridge and many people walk there every day " * 6


def piped(*arguments, lines=""):
    command = [sys.executable, "-m", "headwater", *arguments]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=PATIENCE)


def test_bench_sees_the_hits_of_shared_prefixes(url, tmp_path):
    path = tmp_path / "report.json"
    sizes = ["--prefix-tokens", "200", "--prompt-tokens", "20", "--output-tokens", "4", "--prefixes", "1"]
    done = headwater("bench", "serve", "--url", url, *sizes, "--requests", "6", "--json", str(path))
    assert done.returncode == 0, done.stderr
    (phase,) = json.loads(path.read_text())["phases"]
    summary, rows = phase["summary"], phase["rows"]
    assert summary["outcomes"] == {"ok": 6}
    assert summary["hit_rate"] > 0
    assert summary["cached_tokens"] == sum(row["cached_tokens"] for row in rows)
    assert summary["output_tokens"] == sum(row["output_tokens"] for row in rows)
    assert all(row["resumed_at"] == row["cached_tokens"] for row in rows)
    assert sum(summary["reasons"].values()) == 6


def test_second_turn_of_a_piped_chat_is_cached(url):
    done = piped("chat", "--url", url, "--max-tokens", "8", lines=f"{LINE}\n{LINE}\n")
    assert done.returncode == 0, done.stdout
    first, second = re.findall(r"\[prompt ([\d,]+) tokens, cached ([\d,]+) tokens, resumed at ([\d,]+)", done.stdout)
    assert first[1] == "0"
    assert int(second[1]) == int(second[2]) > 0


def test_doctor_finds_this_machine_fit_for_the_embedded_model():
    done = headwater("doctor", "--json", "--memory", "200MB", "--port", "0")
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    levels = {finding["name"]: finding["level"] for finding in report["findings"]}
    assert levels["qwen3_5_text in float32"] == levels["qwen3_5_text in bfloat16"] == "ok"
    assert levels["denormals"] == "ok"
    assert "FAIL" not in levels.values()
