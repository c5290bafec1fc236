"""`headwater eval`: its tables and files, what it refuses, and a real server's hits."""

import json
import math
import socket
import subprocess
import sys

import pytest

from headwater.cli import run
from headwater.config import ServeConfig
from headwater.server.app import create_app
from tests.evaluate.items import fields, tool_item
from tests.evaluate.test_asking import remembering, reply
from tests.load.openai_server import OpenAiServer, Script
from tests.server.conftest import engine
from tests.server.routes.test_serving import Server

TOOL = {"tools": list(tool_item().tools), "call": {"name": "look_up", "arguments": {"code": "K1"}}, "answers": []}

__all__ = ["engine"]  # a fixture


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        "".join(json.dumps(fields(group=group, answers=[a])) + "\n" for group in (0, 1) for a in ("Ada", "Bo"))
    )
    return path


def test_eval_tables_and_json_file_agree(tasks, tmp_path, capsys):
    out = tmp_path / "out.json"
    with OpenAiServer(remembering) as fake:
        assert (
            run(["eval", "--url", fake.url, "--tasks", str(tasks), "--paired", "--json", str(out), "--api-key", "k"])
            == 0
        )
    printed = capsys.readouterr().out
    assert "50.0 [50.0,50.0]" in printed
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


@pytest.mark.parametrize(("comparison", "asked"), [([], False), (["--paired"], True), (["--segments"], True)])
def test_log_probabilities_are_asked_for_where_answers_are_compared(tasks, comparison, asked):
    with OpenAiServer(remembering) as fake:
        assert run(["eval", "--url", fake.url, "--tasks", str(tasks), "--limit", "1", *comparison]) == 0
        assert {"logprobs" in body for body in fake.bodies} == {asked}


def test_refused_eval_requests_are_counted_and_shown(tasks, capsys):
    def answer(server, body):
        too_long = {"error": {"message": "prompt has 9,000 tokens, the model takes 4,096"}}
        return Script(status=400, body=too_long) if len(server.bodies) == 1 else Script(body=reply())

    with OpenAiServer(answer) as fake:
        assert run(["eval", "--url", fake.url, "--tasks", str(tasks), "--concurrency", "1"]) == 0
    printed = capsys.readouterr().out
    assert "served: 1 x refused: prompt has 9,000 tokens, the model takes 4,096" in printed
    assert "25.0" in printed


def test_server_that_answers_nothing_makes_exit_code_1(tasks, capsys):
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
        (["--url", "http://127.0.0.1:9", "--json", "/dev/null/out.json"], "/dev/null/out.json"),
        (["--limit", "0"], "limit"),
        (["--text", "/nonexistent"], "/nonexistent"),
        (["--window", "1"], "window"),
        (["--weights", "int8", "--url", "http://127.0.0.1:9"], "weights is int8 and url is http://127.0.0.1:9"),
        (["--paired", "--segments"], "--paired and --segments"),
        (["--paired", "--against", "http://127.0.0.1:9"], "--paired and --against"),
        (["--segments", "--against", "http://127.0.0.1:9"], "--segments and --against"),
        (["--text", __file__, "--paired"], "--text and --paired"),
        (["--text", __file__, "--segments"], "--text and --segments"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(tasks, capsys, arguments, part):
    asked = [] if "--tasks" in arguments else ["--tasks", str(tasks)]
    assert run(["eval", *arguments, *asked]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headwater: ")
    assert part in line


def test_unreachable_server_is_refused_in_one_line(tasks, capsys):
    with OpenAiServer() as gone:
        url = gone.url
    assert run(["eval", "--url", url, "--tasks", str(tasks)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert url in line


def test_malformed_task_line_is_refused_before_a_server_starts(tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text(json.dumps(fields()) + "\n{}\n")
    assert run(["eval", "--tasks", str(tmp_path / "bad.jsonl")]) == 2
    assert "bad.jsonl, line 2: kind is missing" in capsys.readouterr().err


def test_missing_model_is_refused_with_the_servers_message(tasks, tmp_path, capsys):
    assert run(["eval", str(tmp_path), "--tasks", str(tasks)]) == 2
    assert "config.json" in capsys.readouterr().err


def scoring(likely):
    """A server of words with the given likelihoods."""

    def answer(server, body):
        if "add_special_tokens" in body:
            return Script(body={"tokens": list(range(len(body["prompt"].split())))})
        if "messages" in body:
            tops = [{"token": name, "logprob": math.log(part)} for name, part in (("a", likely), ("b", 0.01))]
            told = {"content": [{"token": "a", "logprob": math.log(likely), "top_logprobs": tops}]}
            return Script(body={"choices": [{"message": {"content": "a"}, "logprobs": told}]})
        n = len(body["prompt"])
        told = {
            "token_logprobs": [None, *[math.log(likely)] * n],  # with the one that is generated
            "top_logprobs": [None, *[{"a": math.log(likely)} if body["logprobs"] else {}] * n],
            "text_offset": [3 * place for place in range(n + 1)],
        }
        return Script(body={"choices": [{"text": "ab " * n, "logprobs": told}]})

    return answer


def test_text_s_perplexity_and_its_divergence_from_another_server_s(tmp_path, capsys):
    (tmp_path / "text").write_text("ab " * 10)
    out = tmp_path / "out.json"
    with OpenAiServer(scoring(0.5)) as fake, OpenAiServer(scoring(0.25)) as other:
        options = ["--url", fake.url, "--text", str(tmp_path / "text"), "--window", "4"]
        assert run(["eval", *options]) == 0
        assert [body["prompt"] for body in sorted(fake.bodies[1:], key=lambda body: body["prompt"])] == [
            [0, 1, 2, 3],
            [3, 4, 5, 6],
            [6, 7, 8, 9],
        ]
        assert run(["eval", *options, "--against", other.url, "--json", str(out)]) == 0
    assert "2.000 │      0.3333 │      9 │    27" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert [one["per_token"] for one in report["perplexity"].values()] == pytest.approx([2, 4])
    apart = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert report["divergence"]["mean"]["mean"] == pytest.approx(apart)
    assert report["divergence"]["positions"] == 9


def test_another_server_is_asked_before_anything_is_scored(tmp_path, capsys):
    """The other server is gone, or has a different tokenizer."""
    (tmp_path / "text").write_text("ab " * 10)

    def spelling(server, body):
        return Script(body={"tokens": list(body["prompt"].encode())})

    with OpenAiServer(scoring(0.5)) as fake, OpenAiServer(spelling) as other:
        options = ["eval", "--url", fake.url, "--text", str(tmp_path / "text"), "--against"]
        assert run([*options, other.url]) == 2
        assert run([*options, "http://127.0.0.1:9"]) == 2
        assert all("add_special_tokens" in body for body in (*fake.bodies, *other.bodies))
        url = other.url
    told, gone = capsys.readouterr().err.splitlines()
    assert "has 10 tokens" in told
    assert f"{url} 30;" in told
    assert "127.0.0.1:9" in gone


def test_divergence_of_first_tokens(tasks, tmp_path, capsys):
    out = tmp_path / "out.json"

    def sometimes(server, body):
        if len(server.bodies) == 2:
            return Script(status=400, body={"error": {"message": "too long"}})
        return scoring(0.25)(server, body)

    with OpenAiServer(scoring(0.5)) as fake, OpenAiServer(sometimes) as other:
        options = ["--url", fake.url, "--tasks", str(tasks), "--against", other.url, "--json", str(out)]
        assert run(["eval", *options]) == 0
        assert {(body["max_tokens"], body["top_logprobs"]) for body in other.bodies} == {(1, 20)}
    found = json.loads(out.read_text())["divergence"]
    assert (found["positions"], found["same_first"], found["failed"]) == (3, 3, {"too long": 1})
    apart = 0.5 * math.log(2) + 0.49 * math.log(0.49 / 0.74)
    assert (found["mean"]["mean"], found["max"]) == pytest.approx((apart, apart))
    assert "1 x too long" in capsys.readouterr().out


def test_server_that_tells_no_log_probabilities_is_named(tasks, tmp_path, capsys):
    (tmp_path / "text").write_text("ab cd")

    def silent(server, body):
        return Script(body={"tokens": [1, 2]} if "add_special_tokens" in body else reply())

    with OpenAiServer(silent) as fake:
        assert run(["eval", "--url", fake.url, "--text", str(tmp_path / "text")]) == 2
        assert run(["eval", "--url", fake.url, "--tasks", str(tasks), "--against", fake.url]) == 2
        url = fake.url
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(url in line and "no log probabilities" in line for line in lines)


def test_headwater_s_server_scores_a_text(engine, tmp_path):
    """The fake engine gives each token of a prompt, which is a byte, the log probability -0.5."""
    text = "Naïve 🙂 rivers flow. " * 9
    (tmp_path / "text").write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as sock, Server(create_app(engine, ServeConfig()), sock):
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        options = ["--text", str(tmp_path / "text"), "--window", "64", "--json", str(tmp_path / "out.json")]
        assert run(["eval", "--url", url, "--against", url, *options]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    (found,) = report["perplexity"].values()
    assert found["per_token"] == pytest.approx(math.exp(0.5))
    assert found["tokens"] == found["bytes"] == len(text.encode()) - 1
    assert report["divergence"]["max"] == 0
    assert report["divergence"]["same_first"] == report["divergence"]["positions"] == found["tokens"]


def test_eval_on_its_own_server_hits_without_changing_bits(tmp_path, capsys):
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


def test_another_server_is_evaluated_without_torch(tmp_path):
    """Items with tool calls, a text, and two servers: nothing imports torch, nor a web framework."""
    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in (fields(), fields(kind="tool", **TOOL)))
    )
    (tmp_path / "text").write_text("ab " * 10)
    with OpenAiServer(scoring(0.5)) as fake:
        asked = ["eval", "--url", fake.url, "--tasks", str(tmp_path / "tasks.jsonl"), "--max-tokens", "3"]
        lines = [asked, [*asked, "--segments"], [*asked, "--against", fake.url],
                 ["eval", "--url", fake.url, "--text", str(tmp_path / "text")]]  # fmt: skip
        program = (
            f"import sys; from headwater.cli import run; codes = [run(line) for line in {lines!r}]; "
            "print(codes, *({'torch', 'fastapi', 'uvicorn'} & {*sys.modules}))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0]"


def test_tool_calls_without_jsonschema_are_an_error_before_anything_is_asked(tmp_path, monkeypatch, capsys):
    (tmp_path / "tasks.jsonl").write_text(json.dumps(fields(kind="tool", **TOOL)) + "\n")
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with OpenAiServer(scoring(0.5)) as fake:
        assert run(["eval", "--url", fake.url, "--tasks", str(tmp_path / "tasks.jsonl")]) == 2
        assert fake.bodies == []
    assert "pip install 'headwater[eval]'" in capsys.readouterr().err
