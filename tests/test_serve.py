"""`headwater serve` as a process: starts with its embedded model, serves, and stops in order."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import openai
import pytest

PATIENCE = 120  # seconds after which something that must happen has not
PROMPT = "the quiet river flows under the old stone bridge and " * 40


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The user's cache folder."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def server(home):
    """A server on a free port: the process, what it said at start-up, and a client."""
    command = [sys.executable, "-m", "headwater", "serve", "--port", "0", "--memory", "200MB"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(home)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            said = [process.stdout.readline() for _ in range(3)]
            url = re.search(r"http://127\.0\.0\.1:\d+/v1", said[1])
            assert url, process.stderr.read() if process.poll() is not None else said
            with openai.OpenAI(base_url=url[0], api_key="none", timeout=PATIENCE) as client:
                yield process, said, client
        finally:
            process.kill()


def test_the_embedded_model_serves_hits_and_stops_when_told(server, home):
    process, said, client = server
    assert "answers are noise" in said[0]
    assert "caching is real" in said[0]
    assert said[2].strip() == "Deterministic: yes"
    assert any((home / "headwater").iterdir())
    first, again = (
        client.completions.create(model="any", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=1) for _ in "12"
    )
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == (again.usage.prompt_tokens - 1) // 64 * 64 > 0
    assert again.choices[0].logprobs.token_logprobs == first.choices[0].logprobs.token_logprobs
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert re.search(r"completion\[0\] .*reason=cold .*\n.*completion\[0\] .*reason=full ", log), log
    assert "Traceback" not in log
