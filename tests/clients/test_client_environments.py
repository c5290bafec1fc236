"""Environments of real clients: installed once for each set of pins, and cut off from other hosts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.clients import client as module
from tests.clients.client import read, with_python

SCRIPT = """\
# /// script
# dependencies = ["some[extra]==1.2.3", "other==4"]
# [tool.headwater]
# shows = ["reply"]
# ///
import os, json
print("a line of the client's own")
print(json.dumps({"reply": os.environ["BASE_URL"]}))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "some.py").write_text(SCRIPT)
    return tmp_path / "some.py"


@pytest.fixture
def installs(monkeypatch, tmp_path) -> list[str]:
    """Pins that were installed, in order."""
    done = []

    def install(client):
        client.folder.mkdir(parents=True)
        done.append(client.dependencies[0])

    monkeypatch.setattr(module, "ENVIRONMENTS", tmp_path / "environments")
    monkeypatch.setitem(module.KINDS, ".py", (install, lambda client: with_python(client, sys.executable)))
    return done


def test_head_has_pins_and_checks(script):
    client = read(script)
    assert (client.name, client.version, client.shows) == ("some", "1.2.3", ("reply",))
    assert client.dependencies == ("some[extra]==1.2.3", "other==4")


def test_client_is_installed_again_if_a_pin_changes(script, installs):
    read(script).installed()
    read(script).installed()
    script.write_text(SCRIPT.replace("1.2.3", "1.2.4"))
    read(script).installed()
    assert installs == ["some[extra]==1.2.3", "some[extra]==1.2.4"]


def test_installation_that_failed_is_tried_again(script, installs, monkeypatch):
    def fail(client):
        client.folder.mkdir(parents=True)
        raise subprocess.CalledProcessError(1, "pip")

    install, command = module.KINDS[".py"]
    monkeypatch.setitem(module.KINDS, ".py", (fail, command))
    with pytest.raises(subprocess.CalledProcessError):
        read(script).installed()
    monkeypatch.setitem(module.KINDS, ".py", (install, command))
    read(script).installed()
    assert len(installs) == 1


def test_client_script_prints_its_findings_on_its_last_line(script, tmp_path):
    client = read(script)
    seen = client.run(with_python(client, sys.executable), "http://127.0.0.1:1", tmp_path, "http://127.0.0.1:2")
    assert seen == {"reply": "http://127.0.0.1:1"}


def test_script_that_fails_is_reported_with_its_errors(script, tmp_path):
    script.write_text(SCRIPT + "raise SystemExit('no answer')\n")
    client = read(script)
    with pytest.raises(AssertionError, match=r"(?s)some ended with 1.*no answer"):
        client.run(with_python(client, sys.executable), "http://127.0.0.1:1", tmp_path, "http://127.0.0.1:2")


def test_other_hosts_are_refused_and_noted(outside):
    with httpx.Client(proxy=outside.url) as client:
        assert client.get("http://one.invalid:81/path").status_code == 502
        with pytest.raises(httpx.ProxyError):
            client.get("https://two.invalid/path")
    assert outside.asked == {"one.invalid", "two.invalid"}


def test_node_script_runs_next_to_its_modules(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ENVIRONMENTS", tmp_path / "environments")
    text = SCRIPT.replace("# ", "// ").replace("some[extra]==1.2.3", "@of/some@1.2.3")
    (tmp_path / "some.mjs").write_text(text)
    client = read(tmp_path / "some.mjs")
    assert (client.name, client.version, client.shows) == ("some", "1.2.3", ("reply",))
    client.folder.mkdir(parents=True)
    _, command = module.KINDS[".mjs"]
    assert command(client) == ["node", str(client.folder / "some.mjs")]
    assert (client.folder / "some.mjs").read_text() == text
