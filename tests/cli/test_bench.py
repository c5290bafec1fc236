"""`headwater bench serve`: its report adds up, its options are checked, and it shows the hits of a real server."""

import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from headwater.cli import run
from tests.load.openai_server import PATIENCE, OpenAiServer, Script


@pytest.fixture
def server():
    with OpenAiServer() as server:
        yield server


def bench(server, tmp_path, *arguments):
    """The report of a run that is to succeed."""
    path = tmp_path / "report.json"
    small = ["--prefix-tokens", "40", "--prompt-tokens", "10", "--output-tokens", "3"]
    assert run(["bench", "serve", "--url", server.url, "--json", str(path), *small, *arguments]) == 0
    return json.loads(path.read_text())


def adds_up(phase):
    rows, summary = phase["rows"], phase["summary"]
    ok = [row for row in rows if row["outcome"] == "ok"]
    assert summary["requests"] == len(rows) == sum(summary["outcomes"].values())
    assert summary["outcomes"].get("ok", 0) == len(ok)
    for total, of in (("prompt_tokens", "prompt_tokens"), ("cached_tokens", "cached_tokens"), ("output_tokens",) * 2):
        assert summary[total] == sum(row[of] for row in ok)
    assert summary["hit_rate"] == pytest.approx(summary["cached_tokens"] / summary["prompt_tokens"])
    assert sum(summary["reasons"].values()) == len(ok)
    assert summary["itl"]["count"] == sum(len(row["gaps"]) for row in ok)
    assert summary["ttft"]["max"] == pytest.approx(max(row["ttft"] for row in ok), abs=1e-6)


def test_report_adds_up(server, tmp_path, capsys):
    report = bench(server, tmp_path, "--requests", "12", "--concurrency", "3", "--prefixes", "2")
    (phase,) = report["phases"]
    adds_up(phase)
    assert len(server.bodies) == 12
    assert phase["summary"]["hit_rate"] > 0.5  # all but the first two share 40 of some 50 words
    assert report["settings"]["concurrency"] == 3
    assert report["settings"]["model"] == "words-1"
    assert report["server"]["/health"] == {"status": "ok"}
    assert "api_key" not in report["settings"]
    assert "12 ok" in capsys.readouterr().out


def test_equal_seeds_send_equal_requests(server, tmp_path):
    for seed in "112":
        bench(server, tmp_path, "--requests", "4", "--concurrency", "1", "--draw", "chat", "--seed", seed)
    first, again, other = (server.bodies[i : i + 4] for i in (0, 4, 8))
    assert first == again
    assert {str(body["messages"]) for body in first}.isdisjoint(str(body["messages"]) for body in other)


@pytest.mark.parametrize("draw", ["shared", "unique"])
def test_token_ids_have_the_lengths_asked_for(server, tmp_path, draw):
    bench(server, tmp_path, "--requests", "3", "--draw", draw, "--vocab", "7")
    assert {len(body["prompt"]) for body in server.bodies} == {50 if draw == "shared" else 10}
    assert max(token for body in server.bodies for token in body["prompt"]) < 7


def test_overload_fairness_and_warm_up_are_phases_of_one_report(server, tmp_path, capsys):
    report = bench(server, tmp_path, "--requests", "6", "--overload", "1,4", "--warmup", "5")
    assert [phase["name"] for phase in report["phases"]] == ["capacity", "1x", "4x"]
    assert len(server.bodies) == 5 + 18
    report = bench(server, tmp_path, "--requests", "5", "--rate", "200", "--fairness", "3")
    beside = report["phases"][1]
    assert set(beside["tenants"]) == {"quiet", "flood"}
    assert sum(tenant["requests"] for tenant in beside["tenants"].values()) == 20
    adds_up(beside)
    printed = capsys.readouterr().out
    assert "capacity" in printed
    assert "flood" in printed


def test_recorded_traffic_keeps_its_times(server, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"prompt": [1, 2, t], "t": 100 + t}) + "\n" for t in (2, 0, 1)))
    report = bench(server, tmp_path, str(log), "--rate", "recorded", "--speed", "100")
    assert [row["due"] for row in report["phases"][0]["rows"]] == [0.0, 0.01, 0.02]
    assert [body["prompt"][2] for body in sorted(server.bodies, key=lambda body: body["prompt"])] == [0, 1, 2]


def test_plots_are_written(server, tmp_path):
    pytest.importorskip("matplotlib")
    bench(server, tmp_path, "--requests", "4", "--plots", str(tmp_path / "plots"))
    names = {path.stem for path in (tmp_path / "plots").iterdir()}
    assert names == {"ttft_cdf", "itl_cdf", "throughput", "hit_rate", "ttft_by_prompt_length"}


def test_plots_without_matplotlib_are_refused_before_anything_is_sent(server, tmp_path, monkeypatch, capsys):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("headwater.load.report.importlib.import_module", missing)
    assert run(["bench", "serve", "--url", server.url, "--plots", str(tmp_path)]) == 2
    assert "headwater[plots]" in capsys.readouterr().err
    assert server.bodies == []


def test_server_that_answers_nothing_makes_exit_code_1(capsys):
    with OpenAiServer(lambda *_: Script(status=500, body={"error": {"message": "boom"}})) as server:
        assert run(["bench", "serve", "--url", server.url, "--requests", "3"]) == 1
    assert "boom" in capsys.readouterr().out


@pytest.mark.parametrize("ending", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_interrupted_bench_reports_the_requests_so_far(tmp_path, ending):
    def answer(server, body):
        script = server.talk(body)
        return script if len(server.bodies) <= 2 else replace(script, hold_after=1)

    path = tmp_path / "report.json"
    with OpenAiServer(answer) as server:
        options = ["--url", server.url, "--requests", "9", "--concurrency", "1", "--json", str(path)]
        command = [sys.executable, "-m", "headwater", "bench", "serve", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert server.holding.wait(PATIENCE)
                process.send_signal(ending)
                printed, _ = process.communicate(timeout=PATIENCE)
            finally:
                process.kill()
    assert process.returncode == 0
    assert "2 ok, 1 interrupted" in printed
    assert json.loads(path.read_text())["phases"][0]["summary"]["outcomes"] == {"ok": 2, "interrupted": 1}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--draw", "nothing"], "'nothing'"),
        (["--history", "none"], "'none'"),
        (["--process", "x", "--rate", "1"], "'x'"),
        (["--rate", "0"], "rate is '0'"),
        (["--rate", "fast"], "'fast'"),
        (["--rate", "inf"], "'inf'"),
        (["--rate", "recorded"], "no file"),
        (["--rate", "1", "--concurrency", "2"], "concurrency is 2"),
        (["--overload", "1", "--rate", "2"], "overload"),
        (["--fairness", "3"], "rate must be a number"),
        (["--requests", "0"], "requests is 0"),
        (["--draw", "chat", "--vocab", "9"], "vocab (9)"),
        (["--prompt-tokens", "0"], "prompt_tokens is 0"),
        (["/nonexistent.jsonl"], "/nonexistent.jsonl"),
        (["--url", "127.0.0.1:1"], "http://"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(server, capsys, arguments, part):
    url = [] if "--url" in arguments else ["--url", server.url]
    assert run(["bench", "serve", *url, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headwater: ")
    assert part in line
    assert server.bodies == []


def test_unreachable_server_is_refused_in_one_line(capsys):
    with OpenAiServer() as gone:
        url = gone.url
    assert run(["bench", "serve", "--url", url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert url in line
