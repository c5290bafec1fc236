"""The demo keeps its word about promises: it passes where they are kept and fails where they are broken."""

import importlib.util
import re
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from headwater.config import ServeConfig
from headwater.server.app import create_app
from tests.server import fake_engine
from tests.server.fake_engine import FakeEngine
from tests.server.routes.test_serving import Server

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


@pytest.fixture
def demo(monkeypatch):
    """The demo's module, talking to a fake engine instead of `headwater serve`."""
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(DEMO.parent)
    monkeypatch.setitem(sys.modules, "demo", module)
    spec.loader.exec_module(module)
    engine = FakeEngine(max_model_len=50_000)
    engine.start()

    @contextmanager
    def served():
        with socket.create_server((module.HOST, 0)) as sock, Server(create_app(engine, ServeConfig()), sock):
            yield f"http://{module.HOST}:{sock.getsockname()[1]}/v1"

    monkeypatch.setattr(module, "served", served)
    yield module
    engine.stop()


def test_demo_prints_every_conversation_and_the_saved_tokens(demo, capsys):
    assert demo.main() == 0
    printed = capsys.readouterr().out
    for converse in demo.CONVERSATIONS:
        assert converse.__name__.split("_")[0] in printed
    assert re.search(r"Right answers: \d+ of \d+\.", printed)
    assert re.search(r"Prefill saved: [\d,]+ of [\d,]+ prompt tokens \(\d+%\)", printed)
    assert "Every promise was kept." in printed


def test_demo_fails_where_nothing_is_cached(demo, capsys, monkeypatch):
    monkeypatch.setattr(fake_engine, "_common", lambda a, b: 0)
    assert demo.main() == 1
    assert "resend, the same again: 0 tokens cached" in capsys.readouterr().out


def test_demo_fails_where_a_hit_changes_the_answer(demo, capsys, monkeypatch):
    account = FakeEngine.account

    def account_and_change(self, generation):
        self.script += "x"
        return account(self, generation)

    monkeypatch.setattr(FakeEngine, "account", account_and_change)
    monkeypatch.setattr(demo, "ANSWER_TOKENS", 200)
    assert demo.main() == 1
    assert "Broken: resend: a hit changed the answer" in capsys.readouterr().out


def test_demo_reports_a_failed_server(demo, capsys, monkeypatch):
    @contextmanager
    def failing():
        raise demo.ServerFailed("the server ended with exit code 2")
        yield

    monkeypatch.setattr(demo, "served", failing)
    assert demo.main() == 1
    assert "Failed: the server ended with exit code 2" in capsys.readouterr().out


@pytest.mark.full
def test_demo_keeps_every_promise_with_the_real_server():
    done = subprocess.run([sys.executable, str(DEMO)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
