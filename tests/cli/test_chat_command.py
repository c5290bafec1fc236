"""Commands that talk to a server."""

import io
import json
import re
import subprocess
import sys
from contextlib import closing

import httpx
import pytest
from rich.console import Console

from headwater.cli import run
from headwater.cli.chat import COMMANDS, Conversation, PrefillBar, Terminal, account_line, outline
from headwater.load.answer import Answer
from tests.forked import PATIENCE, headwater
from tests.load.openai_server import OpenAiServer, Script, chunk, usage


@pytest.fixture
def server():
    with OpenAiServer() as server:
        yield server


@pytest.fixture
def chat(server, monkeypatch, capsys):
    """Exit code and output for lines of input."""

    def chat(*lines, options=("--max-tokens", "3")):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = run(["chat", "--url", server.url, *options])
        return code, capsys.readouterr().out

    return chat


def test_chat_prints_two_turns_with_their_cached_tokens(chat, server):
    code, printed = chat("one two", "", "three")
    assert code == 0
    first, told_first, second, told_second = printed.splitlines()
    assert first == second == "w0 w1 w2 "
    assert told_first.startswith("[0 of 2 tokens known (diverged), first token after ")
    assert told_second.startswith("[2 of 6 tokens known (diverged), first token after ")
    assert [len(body["messages"]) for body in server.bodies] == [1, 3]


def test_reasoning_is_shown_and_not_sent_back(chat, server):
    thinking = [chunk("", reasoning_content="hm, "), chunk("so", "stop"), usage(1, 2, 0)]
    server.answer = lambda *_: Script(thinking)
    _, printed = chat("one", "two")
    assert printed.splitlines()[0] == "hm, so"
    assert server.bodies[1]["messages"][1]["content"] == "so"


def test_progress_is_not_printed_into_a_pipe(chat, server):
    server.answer = lambda *_: Script([": progress 3/9\n\n", chunk("a", "stop"), usage(9, 1, 0)], gap=0.01)
    assert chat("one")[1].splitlines()[0] == "a"


def test_prefill_has_a_bar_on_a_terminal_until_its_answer_begins():
    out = io.StringIO()
    bar = PrefillBar(Console(file=out, force_terminal=True, width=80))
    bar.close()
    assert out.getvalue() == ""
    bar.show(1024, 8000)
    bar.show(2048, 8000)
    bar.close()
    drawn, _, erased = out.getvalue().rpartition("2,048 of 8,000 tokens")
    assert "prompt" in drawn
    assert "\x1b[2K" in erased  # the line is cleared


def test_ctrl_c_stops_the_answer_only(chat, server, monkeypatch):
    whole = httpx.Response.iter_bytes

    def interrupted(response):
        """The first answer's bytes that came before the key was pressed."""
        monkeypatch.setattr(httpx.Response, "iter_bytes", whole)
        yield f"data: {json.dumps(chunk('part'))}\n\n".encode()
        raise KeyboardInterrupt

    monkeypatch.setattr(httpx.Response, "iter_bytes", interrupted)
    code, printed = chat("one", "two", options=("--max-tokens", "3", "--model", "words-1"))
    assert code == 0
    assert printed.splitlines()[:3] == ["part", "(stopped)", "w0 w1 w2 "]
    assert [m["content"] for m in server.bodies[1]["messages"]] == ["one", "part", "two"]


def test_session_lives_on_after_an_error(chat, server):
    answers = iter([Script(status=503, body={"error": {"message": "full [up]"}}), None])
    server.answer = lambda server, body: next(answers) or server.talk(body)
    code, printed = chat("one", "two")
    assert code == 1  # a script should hear of it
    assert printed.splitlines()[:2] == ["full [up]", "w0 w1 w2 "]
    assert [m["content"] for m in server.bodies[1]["messages"]] == ["two"]


def test_commands(chat, server, tmp_path):
    server.pages["/cache"] = {"pages": 1200, "kinds": {"kv": 3}, "tree": [1, 2]}
    path = tmp_path / "chat.jsonl"
    lines = ("/system be kind", "one", "/retry", f"/save {path}", "/new", "two", "/cache", "/quit", "never")
    code, printed = chat(*lines)
    assert code == 0
    sent = [[m["content"] for m in body["messages"]] for body in server.bodies]
    assert sent == [["be kind", "one"], ["be kind", "one"], ["be kind", "two"]]
    assert path.is_file()
    assert printed.splitlines()[-4:] == ["pages: 1,200", "kinds:", "  kv: 3", "tree: (2)"]


def test_file_is_sent_with_the_next_message_only(chat, server, tmp_path):
    (tmp_path / "notes.txt").write_text("the fair is on 9 May")
    code, printed = chat(f"/file {tmp_path}/notes.txt", "When is it?", "Sure?")
    assert (code, printed.splitlines()[0]) == (0, "20 characters are sent with the next message.")
    asked = [body["messages"][-1]["content"] for body in server.bodies]
    assert asked == ["notes.txt:\n\nthe fair is on 9 May\n\nWhen is it?", "Sure?"]


def test_demo_gives_a_document_and_a_question(chat, server):
    code, printed = chat("/demo")
    system, question = server.bodies[0]["messages"]
    assert code == 0
    assert len(system["content"].split()) > 700
    assert printed.startswith(f"> {question['content']}\n")
    assert "Ask more" in printed


@pytest.mark.parametrize("model", ["headwater-tiny", "words-1"])
def test_greeting_names_the_model_in_80_columns(server, monkeypatch, model):
    out = io.StringIO()
    monkeypatch.setattr("builtins.input", lambda prompt: "/quit")
    with closing(Conversation(server.url, model=model)) as talk:
        Terminal(talk, Console(file=out, width=80, soft_wrap=True), True).run()
    lines = out.getvalue().splitlines()
    assert lines[0] == f"{model} at {server.url}"
    assert any("/demo gives it one" in line for line in lines) == (model == "headwater-tiny")
    assert max(map(len, lines)) <= 80


def test_turn_names_the_seconds_that_known_tokens_save():
    answer = Answer()
    answer.usage = {"prompt_tokens": 1963, "prompt_tokens_details": {"cached_tokens": 1920}, "completion_tokens": 1}
    line = account_line(answer, 0.9, 11.0)
    assert line == "[1,920 of 1,963 tokens known, first token after 0.90 s instead of about 11.00 s]"


def test_refused_connection_explains_how_to_start_a_server(chat):
    with OpenAiServer() as server:
        absent = server.url
    code, printed = chat("one", options=("--url", absent))
    assert code == 1
    assert "`headwater serve` starts a server here, --url names another one" in printed


def test_missing_certificates_are_one_line(capsys):
    assert run(["chat", "--ca", "/nowhere.pem"]) == 2
    assert "certificates of --ca '/nowhere.pem' or SSL_CERT_FILE cannot be read" in capsys.readouterr().err


def test_help_names_every_command(chat):
    _, printed = chat("/help")
    assert [line.split()[0] for line in printed.splitlines()] == [f"/{name}" for name in COMMANDS]
    assert list(COMMANDS) == ["new", "system", "retry", "demo", "file", "cache", "save", "quit", "help"]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("/bogus", "/bogus is not a command"),
        ("/cache", "no /cache"),
        ("/save", "name of a file"),
        ("/file", "path of a file"),
        ("/file /nowhere", "No such file"),
        ("/retry", "nothing was asked"),
    ],
)
def test_failed_chat_command_prints_its_error(chat, line, part):
    code, printed = chat(line)
    assert code == 1
    assert part in printed


def test_url_that_is_none_is_one_line(capsys):
    assert run(["chat", "--url", "nowhere"]) == 2
    assert "http://" in capsys.readouterr().err


def test_outline_ends_somewhere():
    assert outline({"a": {"b": {"c": {"d": 1}}}, "e": True}) == ["a:", "  b:", "e: True"]


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
    first, second = re.findall(r"\[([\d,]+) of [\d,]+ tokens known", done.stdout)
    assert first == "0"
    assert int(second) > 0
    assert re.search(r"known.*, first token after [\d.]+ s instead of about [\d.]+ s", done.stdout)


def test_doctor_finds_this_machine_fit_for_the_embedded_model():
    done = headwater("doctor", "--json", "--memory", "200MB", "--port", "0")
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    levels = {finding["name"]: finding["level"] for finding in report["findings"]}
    assert levels["qwen3_5_text in float32"] == levels["qwen3_5_text in bfloat16"] == "ok"
    assert levels["denormals"] == "ok"
    assert "FAIL" not in levels.values()
