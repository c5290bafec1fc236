"""The command `replay`, also of clusters."""

import json
import re
from pathlib import Path

import pytest

import headwater.cli.replay as command
from headwater.cli import run
from headwater.lab.replay import run_grid
from headwater.models.files import embedded

ROW = [
    "memory", "pool", "placement", "eviction", "requests", "prompt_tokens", "hit_tokens", "token_hit_rate",
    "ideal_hit_rate", "stranded_tokens", "flops_saved", "flops_saved_share", "checkpoints_taken", "checkpoints_hit",
    "evictions", "misses_by_reason", "ttft_ms", "queue_depth", "alpha", "seconds", "peak_rss_mb", "segments",
    "speculation", "tpot_ms", "accepted_drafts", "rejected_drafts", "tier", "loaded_tokens",
    "tier_peak_bytes", "tier_written_bytes", "hints", "high_hit_rate", "cluster", "tails",
    "reported_hit_rate", "recomputed_tokens",
]  # fmt: skip
RUN = ["version", "commit", "trace", "trace_digest", "model", "dtype", "weights", "page_size", "seed", "limit"]
RUN += ["arrival", "serve"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three sessions of four turns that share a system prompt of 128 tokens."""
    lines = []
    for session in range(3):
        said = list(range(128))
        for turn in range(4):
            said += range(1000 * (10 * session + turn), 1000 * (10 * session + turn) + 100)
            output = [9_000_000 + 100 * session + turn] * 40
            lines.append({"t": 10 * turn + session, "session": str(session), "input": list(said), "output": output})
            said += output
    lines.sort(key=lambda line: line["t"])
    path = tmp_path / "made.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def replay(*arguments: object) -> int:
    return run(["replay", *map(str, arguments)])


def test_cross_product_is_replayed_and_written(trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, lines, page = tmp_path / "out.json", tmp_path / "requests.jsonl", tmp_path / "report.html"
    files = ("--json", out, "--per-request", lines, "--report", page)
    policies = ("--memory", "1GB,2GiB", "--eviction", "lru,seglen(w=0.5, single_child=False)", "--placement", "branch")
    assert replay(trace, "--page-size", 32, *policies, *files) == 0
    told = json.loads(out.read_text())
    assert list(told) == [*RUN, "rows"]
    assert (told["trace"], told["model"], told["page_size"]) == ("made", "qwen3.5-9b", 32)
    rows = told["rows"]
    assert all(list(row) == ROW for row in rows)
    setups = [(row["memory"], row["placement"], row["eviction"]) for row in rows]
    policies = ("lru", "seglen(w=0.5, single_child=False)")
    assert setups == [(size, "branch", policy) for size in (10**9, 2 * 2**30) for policy in policies]
    per_request = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(per_request) == 4 * 12
    of_first = [line["hit_tokens"] for line in per_request[:12]]
    assert sum(of_first) == rows[0]["hit_tokens"] > 0
    assert rows[0]["token_hit_rate"] == round(rows[0]["hit_tokens"] / rows[0]["prompt_tokens"], 6)
    assert "<html" in page.read_text()
    shown = capfd.readouterr().out
    assert f"{rows[0]['token_hit_rate']:.1%}" in shown


def test_replayed_speculation_speeds_decoding_and_needs_a_clock(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, clock = tmp_path / "out.json", ("--serve", "cpu", "--arrival", "poisson(rate=5, think=1)")
    assert replay(trace, *clock, "--speculation", "off,4@0.9,4@0.9/slots", "--json", out) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["speculation"] for row in rows] == ["off", "4@0.9", "4@0.9/slots"]
    assert rows[0]["accepted_drafts"] == 0 < rows[1]["accepted_drafts"]
    assert rows[1]["tpot_ms"]["p50"] < rows[0]["tpot_ms"]["p50"]
    shown = capfd.readouterr().out
    assert "4@0.9/slots" in shown
    assert replay(trace, "--speculation", "4@0.9") != 0
    assert "--speculation 4@0.9 needs --serve" in capfd.readouterr().err


@pytest.mark.parametrize("clock", [(), ("--serve", "cpu", "--arrival", "poisson(rate=5, think=1)")])
def test_hints_are_given_to_each_row(
    clock: tuple[str, ...], trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert replay(trace, *clock, "--hints", "off,ended,1h,ended+5m", "--json", out) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["hints"] for row in rows] == ["off", "ended", "1h", "ended+5m"]
    assert len({row["hit_tokens"] for row in rows}) == 1  # there is room for all
    assert "ended+5m" in capfd.readouterr().out


def test_under_a_clock_there_are_times_and_a_queue(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert replay(trace, "--serve", "h100", "--arrival", "poisson(rate=5, think=1)", "--json", out) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert list(row["ttft_ms"]) == ["mean", "p5", "p50", "p95", "p99"]
    assert 0 < row["ttft_ms"]["p5"] <= row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"]
    assert row["queue_depth"] >= 0


def test_processes_and_seeds_change_nothing_but_times(trace: Path, tmp_path: Path) -> None:
    told = []
    for jobs in (1, 2):
        out = tmp_path / f"{jobs}.json"
        options = ("--arrival", "poisson(rate=2)", "--seed", 5, "--eviction", "lru,gdsf", "--jobs", jobs)
        assert replay(trace, *options, "--json", out) == 0
        told.append([{**row, "seconds": 0, "peak_rss_mb": 0} for row in json.loads(out.read_text())["rows"]])
    assert told[0] == told[1]


def test_systems_are_pairs_of_policies(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert replay(trace, "--system", "vanilla,vllm+,sglang+,marconi,headwater", "--json", out) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["placement"], row["eviction"]) for row in rows] == [
        ("none", "none"), ("every_block(1)", "lru_path"), ("branch", "lru_path"), ("branch", "marconi"),
        ("headwater", "headwater"),
    ]  # fmt: skip
    assert rows[0]["hit_tokens"] == 0 < rows[1]["hit_tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "1KB"], "1,000 bytes"),
        (["--memory", "much"], "much"),
        (["--eviction", "belady"], "eviction 'belady' is unknown"),
        (["--eviction", "lru,,seglen"], "one of them is empty"),
        (["--placement", "every_block"], "every_block"),
        (["--pool", "round"], "--pool is 'round'"),
        (["--system", "vllm++"], "system 'vllm++' is unknown"),
        (["--model", "gpt-7"], "gpt-7"),
        (["--serve", "tpu"], "tpu"),
        (["--arrival", "sometimes"], "sometimes"),
        (["--decode-reuse", "all"], "--decode-reuse is 'all'"),
        (["--hints", "off,2h"], "hints are '2h', must be off, or ended, high, 5m, 1h, or several kinds as ended+5m"),
        (["--eviction", "flop_aware(alpha='a')"], "alpha is 'a', must be a number"),
        (["--state-fraction", "1.5", "--pool", "split"], "state fraction is 1.5"),
        (["--serve", "h100", "--eviction", "lru,clairvoyant"], "not under a clock"),
        (["--report", "/dev/null/report.html"], "/dev/null/report.html cannot be written"),
        (["--per-request", "/"], "/ cannot be written"),
    ],
)
def test_wrong_option_is_one_line(
    options: list[str], message: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert replay(trace, *options, "--json", out) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.splitlines()[-1].startswith("headwater: ")
    assert "prompt tokens" not in told or "--arrival" in options  # nothing was read, if the fault is known before
    assert "Traceback" not in told
    assert not out.exists()


def test_malformed_trace_line_is_refused_by_number_and_writes_nothing(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = trace.read_text().splitlines()
    lines[4] = '{"session": "x", "input": "words"}'
    trace.write_text("\n".join(lines))
    out = tmp_path / "out.json"
    out.write_text("what was there before")
    assert replay(trace, "--json", out) == 2
    assert "line 5" in capsys.readouterr().err
    assert out.read_text() == "what was there before"


def test_rows_that_are_done_stay_when_the_rest_is_stopped(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*arguments: object, **options: object) -> object:
        yield next(iter(run_grid(*arguments, **options)))  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_grid", stopped)
    out = tmp_path / "out.json"
    assert replay(trace, "--eviction", "lru,seglen", "--jobs", 1, "--json", out) == 130
    rows = json.loads(out.read_text())["rows"]
    assert [row["eviction"] for row in rows] == ["lru"]
    assert "lru" in capsys.readouterr().out


def test_full_disk_leaves_the_old_file(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(trace, "--json", "/dev/full/folder.json") == 2
    assert "folder" in capsys.readouterr().err


def test_drawn_traffic_is_replayed_by_each_way_of_reuse(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, lines = tmp_path / "out.json", tmp_path / "requests.jsonl"
    options = ("--model", "ring-mini-linear-2.0", "--memory", "4GB", "--reuse", "prefix,segments,both")
    drawn = "rag(sessions=20, documents=30, turns=2)"
    assert replay(drawn, *options, "--segment-eviction", "lru,cost", "--json", out, "--per-request", lines) == 0
    rows = json.loads(out.read_text())["rows"]
    ways = [(row["segments"]["reuse"], row["segments"]["eviction"]) for row in rows]
    assert ways == [("prefix", "lru"), ("segments", "lru"), ("segments", "cost"), ("both", "lru"), ("both", "cost")]
    for row in rows:
        of = row["segments"]
        assert row["hit_tokens"] == of["prefix_tokens"] + of["composed_tokens"] - of["made_tokens"]
    per_request = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(per_request) == 5 * 40
    assert sum(line["composed_tokens"] for line in per_request[-40:]) == rows[-1]["segments"]["composed_tokens"] > 0
    assert per_request[-1]["reuse"] == "both"
    shown = capfd.readouterr().out
    assert "segments, cost" in shown
    assert "composed" in shown


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--reuse", "all"), "--reuse is 'all', must be one of prefix, segments, both"),
        (("--segment-eviction", "fifo"), "--segment-eviction is 'fifo'"),
        (("--segment-share", "1.5"), "1.5"),
        (("--reuse", "segments", "--model", "marconi-7b"), "marconi-7b"),
    ],
)
def test_unsupported_segment_options_are_refused(
    options: tuple[str, ...], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert replay("rag(sessions=2, documents=30)", *options) == 2
    assert told in " ".join(capfd.readouterr().err.split())


def test_replay_that_was_killed_continues(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    options = (trace, "--memory", "1GB,2GB,3GB", "--jobs", "1", "--json", out)
    ran = []

    def killed(found, setups, *others):
        for number, result in run_grid(found, setups, *others):
            yield number, result
            ran.append(setups[number].memory)
            if len(ran) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_grid", killed)
    assert replay(*options) == 130
    assert replay(*options) == 0
    assert ran == [10**9, 2 * 10**9, 3 * 10**9]
    assert "2 rows are from an earlier run" in capfd.readouterr().err
    assert [row["memory"] for row in json.loads(out.read_text())["rows"]] == [10**9, 2 * 10**9, 3 * 10**9]
    assert not list(tmp_path.glob(".*.unfinished"))


def served(trace: Path, tmp_path: Path, **head: object) -> Path:
    """A recording with a first line of these fields."""
    lines = [{"headwater_recording": 2, "page_size": 64, **head}]
    lines += [{"t": 0.0, "in": 200, "out": 1, "known": 201, "pages": "0" * 48}] * 3
    path = tmp_path / "day.trace"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_model_and_policies_are_those_of_the_recording_s_server(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    config = json.loads((embedded() / "config.json").read_text())
    head = {"model": "mine", "config": config, "dtype": "float32", "placement": "branch", "eviction": "seglen"}
    assert replay(served(trace, tmp_path, **head), "--json", out) == 0
    told = json.loads(out.read_text())
    assert told["model"] == "mine"
    assert [(row["placement"], row["eviction"]) for row in told["rows"]] == [("branch", "seglen")]
    assert replay(trace, "--json", out) == 0
    told = json.loads(out.read_text())
    assert told["model"] == "qwen3.5-9b"
    assert [(row["placement"], row["eviction"]) for row in told["rows"]] == [("headwater", "headwater")]


def test_weights_are_held_as_the_recording_s_server_held_them(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    config = json.loads((embedded() / "config.json").read_text())
    recording = served(trace, tmp_path, model="mine", config=config, dtype="float32", weights="int8")
    for more, weights in (((), "int8"), (("--weights", "int4"), "int4"), (("--weights", "auto"), "bfloat16")):
        assert replay(recording, "--json", out, "--report", page, *more) == 0
        told = json.loads(out.read_text())
        assert (told["dtype"], told["weights"]) == ("float32", weights)
        assert f"float32, weights {weights}: " in capfd.readouterr().out
        assert f"float32, weights {weights}: " in page.read_text()
    assert replay(trace, "--weights", "int3") == 2
    assert "weights is 'int3', must be one of auto, int8, int4" in capfd.readouterr().err
    assert run(["size", str(trace), "--weights", "int4", "--jobs", "1", "--json", str(out)]) == 0
    told = json.loads(out.read_text())
    assert (told["dtype"], told["weights"]) == ("bfloat16", "int4")
    assert "bfloat16, weights int4: " in capfd.readouterr().out


def test_recording_that_does_not_describe_its_model_asks_for_it(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recording = served(trace, tmp_path, model="mine")
    assert replay(recording) == 2
    assert "does not describe its model 'mine': name it with --model" in capfd.readouterr().err
    assert replay(recording, "--model", "qwen3.5-0.8b") == 0
    assert run(["size", str(served(trace, tmp_path, model="qwen3.5-0.8b")), "--jobs", "1"]) == 0
    assert "qwen3.5-0.8b: headwater, headwater" in capfd.readouterr().out


TRAFFIC = ("replay", "generated(17, requests=40)", "--memory", "4GB", "--arrival", "8", "--jobs", "1")


def test_routers_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    options = ("--serve", "h100", "--workers", "3", "--router", "least_cost,round_robin", "--event-delay", "0.1")
    assert run([*TRAFFIC, *options, "--json", str(out), "--report", str(tmp_path / "page.html")]) == 0
    printed = capfd.readouterr().out
    for part in ("3 simulated workers", "predicted", "least_cost", "round_robin"):
        assert part in printed
    rows = json.loads(out.read_text())["rows"]
    assert [row["cluster"]["router"] for row in rows] == ["least_cost", "round_robin"]
    for row in rows:
        assert sum(worker["requests"] for worker in row["cluster"]["workers"]) == row["requests"]
        assert row["cluster"]["event_delay"] == 0.1
        counts = [worker["requests"] for worker in row["cluster"]["workers"]]
        assert re.search(rf" {min(counts)}(-{max(counts)})? ", printed)


def test_numbers_of_workers_that_prefill_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    options = ("--serve", "h100", "--workers", "3", "--pulls", "12.5GB/s", "--prefill", "0,1", "--json", str(out))
    assert run([*TRAFFIC, *options]) == 0
    rows = [row["cluster"] for row in json.loads(out.read_text())["rows"]]
    assert [row["prefill"] for row in rows] == [0, 1]
    assert rows[0]["handed_over"] == 0 < rows[1]["handed_over"]
    printed = " ".join(capfd.readouterr().out.split())
    assert f"handed over {rows[1]['handed_over']}, " in printed
    assert "its p95" in printed


def test_failures_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    options = ("--serve", "h100", "--workers", "3", "--failures", "off,5s/2s", "--json", str(out))
    brief = ("replay", "rag(sessions=20)", *TRAFFIC[2:])  # TRAFFIC pauses for a day, in which 5,000 workers fail
    assert run([*brief, *options]) == 0
    whole, failing = (row["cluster"] for row in json.loads(out.read_text())["rows"])
    assert (whole["failures"], failing["failures"]) == ("off", "5s/2s")
    assert whole["failed"] == 0 < failing["failed"]
    assert failing["resumed"] > 0 < failing["moved"]
    assert len(failing["workers"]) == 3 + failing["replaced"]
    printed = " ".join(capfd.readouterr().out.split())
    assert f"failed {failing['failed']:,}, resumed {failing['resumed']}, moved {failing['moved']}" in printed


def test_each_table_labels_rows_of_different_memory(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--serve", "h100", "--workers", "2", "--eviction", "lru,headwater")
    assert run([*TRAFFIC, *options, "--memory", "3GB,4GB"]) == 0
    tables = [table for table in re.split(r"\n(?=[┏┌])", capfd.readouterr().out) if "│" in table]
    for column in ("FLOPs", "predicted"):
        (table,) = [one for one in tables if column in one]
        for label in (" 3 ", " 4 ", "lru", "headwater"):
            assert label in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workers", "2"), "--workers 2 needs --serve"),
        (("--serve", "h100", "--router", "least_cost"), "--router least_cost needs --workers"),
        (("--serve", "h100", "--event-delay", "0"), "--event-delay 0 needs --workers"),
        (("--serve", "h100", "--prefill", "1"), "--prefill 1 needs --workers"),
        (("--serve", "h100", "--failures", "60s"), "--failures 60s needs --workers"),
        (("--serve", "h100", "--workers", "2", "--failures", "60"), "failures are '60', must be off or EVERY"),
        (("--serve", "h100", "--workers", "2", "--prefill", "few"), "--prefill has 'few', must have numbers"),
        (("--serve", "h100", "--workers", "2", "--prefill", "1"), "prefill is 1 of 2 workers with pulls off"),
        (
            ("--serve", "h100", "--workers", "2", "--pulls", "1GB/s", "--prefill", "1", "--decode-reuse", "raw"),
            "--prefill 1 excludes --decode-reuse raw",
        ),
        (("--serve", "h100", "--workers", "0"), "'--workers': Input should be"),
        (("--serve", "h100", "--workers", "2", "--router", "best"), "router 'best' is unknown; there are aibrix"),
        (("--serve", "h100", "--workers", "2", "--router", "aibrix(1,2,3,4)"), "router 'aibrix(1,2,3,4)' cannot be"),
        (("--serve", "h100", "--workers", "2", "--event-delay", "-1"), "'--event-delay': Input should be"),
    ],
)
def test_bad_input_is_named(options: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*TRAFFIC, *options]) == 2
    assert message in " ".join(capfd.readouterr().err.replace("│", " ").split())
