"""`headwater eval`: its tables and files, what it refuses, and a real server's hits."""

from __future__ import annotations

import json

import pytest
import typer

from headwater.cli import commands, run
from tests.client.openai_server import OpenAiServer, Script
from tests.quality.items import fields, tool_item
from tests.quality.test_asking import remembering, reply


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        "".join(json.dumps(fields(group=group, answers=[a])) + "\n" for group in (0, 1) for a in ("Ada", "Bo"))
    )
    return path


def test_its_tables_and_its_file_say_the_same(tasks, tmp_path, capsys):
    out = tmp_path / "out.json"
    with OpenAiServer(remembering) as fake:
        assert (
            run(["eval", "--url", fake.url, "--tasks", str(tasks), "--paired", "--json", str(out), "--api-key", "k"])
            == 0
        )
    printed = capsys.readouterr().out
    assert "50.0 [50.0, 50.0]" in printed
    assert "4 of 4" in printed
    assert "32 (80%)" in printed  # saved the second time: 8 of 10 tokens, four times
    report = json.loads(out.read_text())
    assert report["columns"]["cold"]["all"][0]["exact"] == {"mean": 0.5, "low": 0.5, "high": 0.5}
    assert report["comparisons"]["prefix, again"]["saved_tokens"] == 32
    assert len(report["rows"]) == 12
    row = report["rows"][-1]
    assert (row["column"], row["text"], row["answers"], row["exact"]) == ("prefix, again", "Ada", ["Bo"], 0.0)
    assert (row["prompt_tokens"], row["cached_tokens"], row["reason"]) == (10, 8, "full")
    assert "api_key" not in report["settings"]
    assert report["server"]["/health"] == {"status": "ok"}


def test_what_was_refused_is_counted_and_shown(tasks, capsys):
    def answer(server, body):
        too_long = {"error": {"message": "prompt has 9,000 tokens, the model takes 4,096"}}
        return Script(status=400, body=too_long) if len(server.bodies) == 1 else Script(body=reply())

    with OpenAiServer(answer) as fake:
        assert run(["eval", "--url", fake.url, "--tasks", str(tasks), "--concurrency", "1"]) == 0
    printed = capsys.readouterr().out
    assert "served: 1 x refused: prompt has 9,000 tokens, the model takes 4,096" in printed
    assert "25.0" in printed


def test_a_server_that_answers_nothing_makes_exit_code_1(tasks, capsys):
    with OpenAiServer(lambda *_: Script(status=500, body={"error": {"message": "boom"}})) as fake:
        assert run(["eval", "--url", fake.url, "--tasks", str(tasks), "--limit", "2"]) == 1
        assert len(fake.bodies) == 2
    assert "2 x error: boom" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--url", "ftp://host"], "http://"),
        (["--url", "http://127.0.0.1:9", "somewhere"], "give one of them"),
        (["--url", "http://127.0.0.1:9", "--tasks", "/nonexistent.jsonl"], "/nonexistent.jsonl"),
        (["--url", "http://127.0.0.1:9", "--json", "/nonexistent/out.json"], "/nonexistent/out.json"),
        (["--limit", "0"], "limit"),
    ],
)
def test_what_it_cannot_do_is_one_line(tasks, capsys, arguments, part):
    asked = [] if "--tasks" in arguments else ["--tasks", str(tasks)]
    assert run(["eval", *arguments, *asked]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headwater: ")
    assert part in line


def test_nobody_there_is_one_line(tasks, capsys):
    with OpenAiServer() as gone:
        url = gone.url
    assert run(["eval", "--url", url, "--tasks", str(tasks)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert url in line


def test_a_line_that_is_no_item_is_told_before_a_server_is_started(tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text(json.dumps(fields()) + "\n{}\n")
    assert run(["eval", "--tasks", str(tmp_path / "bad.jsonl")]) == 2
    assert "bad.jsonl, line 2: kind is missing" in capsys.readouterr().err


def test_a_model_that_is_none_is_told_in_the_server_s_words(tasks, tmp_path, capsys):
    assert run(["eval", str(tmp_path), "--tasks", str(tasks)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_its_own_server_changes_no_bit_and_hits(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    documents = "The quiet river flows under the old stone bridge. " * 20
    messages = [{"role": "system", "content": documents}, {"role": "user", "content": "What flows?"}]
    tool = tool_item()
    lines = [
        fields(messages=messages),
        fields(messages=messages, kind="tool", tools=list(tool.tools), answers=[],
               call={"name": "look_up", "arguments": {"code": "K1"}}, group=1),
    ]  # fmt: skip
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.json"
    options = ["--paired", "--max-tokens", "4", "--memory", "200MB", "--json", str(out)]
    assert run(["eval", "--tasks", str(tmp_path / "tasks.jsonl"), *options]) == 0, capsys.readouterr()
    again = json.loads(out.read_text())["comparisons"]["prefix, again"]
    assert (again["equal"], again["same_bits"], again["items"]) == (2, 2, 2)
    assert again["saved_tokens"] > 0.5 * again["prompt_tokens"]


def test_the_command_line_of_eval_is_frozen():
    command = typer.main.get_command(commands).commands["eval"]
    options = [option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)]
    assert " ".join(options) == (
        "model --url --api-key --model-name --memory --tasks --limit --paired --max-tokens --thinking --concurrency "
        "--timeout --seed --json"
    )
