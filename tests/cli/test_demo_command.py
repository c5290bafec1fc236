"""`headwater demo`: the same requests to a server with a cache and to one without, over fake engines."""

import os
import queue
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from headwater.cli import demo, run
from headwater.config import ServeConfig
from headwater.server.app import create_app
from tests.server.fake_engine import FakeEngine
from tests.server.routes.test_serving import Server


@pytest.fixture
def scripts(monkeypatch):
    """Serve fake engines instead of `headwater serve`; tests may set the answer of each by the server's flags."""
    answers = {(): "1931", ("--no-cache",): "1931"}

    @contextmanager
    def served(*flags):
        engine = FakeEngine(script=answers[flags], max_model_len=90_000)
        engine.start()
        with socket.create_server(("127.0.0.1", 0)) as sock, Server(create_app(engine, ServeConfig()), sock):
            yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
        engine.stop()

    monkeypatch.setattr(demo, "served", served)
    monkeypatch.setattr(demo, "ARCHIVES", {2_000: (5, 1), 4_000: (10, 100), 8_000: (20, 200)})
    return answers


def test_demo_shows_savings_and_equal_answers_in_80_columns(scripts, monkeypatch, capsys):
    monkeypatch.setattr(demo.shutil, "which", lambda name: None)
    monkeypatch.setattr(demo.sys, "executable", os.path.abspath(".venv/bin/python"))
    assert run(["demo"]) == 0
    printed = capsys.readouterr().out
    assert "One document of 8,000 tokens, five questions" in printed
    assert "In which year was Lanby Works founded? 1931" in printed
    assert "to the letter: 28 of 28." in printed
    assert "What does Lanby Works sell? 1931 (right: iron gates)" in printed
    assert "  .venv/bin/headwater serve LiquidAI/LFM2.5-8B-A1B --weights int4 --memory 4GB" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_demo_fails_if_an_answer_differs_without_the_cache(scripts, capsys):
    scripts["--no-cache",] = "1932"
    assert run(["demo"]) == 1
    printed = capsys.readouterr().out
    assert "to the letter: 0 of 28." in printed
    assert "Different: '1931', '1932'" in printed


def lines(*texts):
    found = queue.Queue()
    for text in texts:
        found.put(text)
    return found


def test_start_waits_for_the_url_as_long_as_lines_come(monkeypatch):
    started = lines("Proving\n", "3 of 17 checks done\n", "Headwater 1 serves tiny on http://127.0.0.1:9/v1\n")
    assert demo.url_of(started) == "http://127.0.0.1:9/v1"
    monkeypatch.setattr(demo, "STALL_SECONDS", 0.01)
    with pytest.raises(demo.ServerFailed, match=r"printed nothing for 0.01 s after: .*3 of 17"):
        demo.url_of(lines("3 of 17 checks done\n"))
    with pytest.raises(demo.ServerFailed, match="has ended: headwater: memory is"):
        demo.url_of(lines("headwater: memory is '1KB'\n", ""))


@pytest.mark.full
def test_demo_of_the_real_model_has_equal_answers():
    done = subprocess.run([sys.executable, "-m", "headwater", "demo"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "28 of 28" in done.stdout
