"""Real clients against a real server: `make test-clients` installs each in an environment of its own.

`make test` runs those that the development environment has, through the same scripts.
"""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.clients.checks import CHECKS
from tests.clients.client import TASK, Client, clients, with_python
from tests.clients.conftest import printed

ALL = {client.name: client for client in clients()}
HERE = ("anthropic", "ollama", "openai")  # in the development environment
OVER_OPENAI = ("langchain", "litellm")  # they are there, too, take seconds to import, and send what its client sends
PINNED = {".py": r"[\w.-]+(\[[\w,.-]+\])?==[\w.]+", ".mjs": r"(@[\w.-]+/)?[\w.-]+@\d[\w.-]*"}


def tried(client: Client, command: list[str], server, outside, tmp_path) -> tuple[str, ...]:
    """Run a client, check what it saw, and return its row of the table."""
    cached, failed = server.cached_tokens(), server.failed()
    seen = client.run(command, server.url, tmp_path, outside.url)
    assert server.failed() == failed
    if "cached" in client.shows:
        seen["cached"] = server.cached_tokens() - cached
    assert sorted(seen) == sorted(client.shows)
    task = json.loads(TASK.read_text())
    did = [CHECKS[name](seen[name], task) for name in client.shows]
    did += [f"looked for {host}" for host in sorted(outside.asked)]
    return client.name, client.version, ", ".join(did)


@pytest.mark.clients
@pytest.mark.parametrize("client", ALL.values(), ids=ALL)
def test_pinned_client(client, server, outside, tmp_path, result):
    result.append((client.name, client.version, "FAILED"))
    row = tried(client, client.installed(), server, outside, tmp_path)
    result[-1] = row


@pytest.mark.parametrize("name", [*HERE, *(pytest.param(name, marks=pytest.mark.full) for name in OVER_OPENAI)])
def test_client_of_the_development_environment(name, server, outside, tmp_path):
    tried(ALL[name], with_python(ALL[name], sys.executable), server, outside, tmp_path)
    assert outside.asked == set()


@pytest.mark.parametrize("client", ALL.values(), ids=ALL)
def test_client_is_pinned_and_shows_something(client):
    assert client.dependencies
    for dependency in client.dependencies:
        assert re.fullmatch(PINNED[client.script.suffix], dependency), f"{dependency} has no exact version"
    assert set(client.shows) <= set(CHECKS)
    assert client.shows
    assert client.version[0].isdigit()


def test_table_of_results_fits_a_terminal():
    rows = [(name, "1.2.3", "a right answer, a stream of 8 pieces, 12345 tokens from the cache") for name in ALL]
    shown = printed(rows)
    assert max(map(len, shown.splitlines())) <= 80
    assert all(name in shown for name in ALL)
