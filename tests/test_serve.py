"""`headwater serve` as a process: starts with its embedded model, serves, and stops in order."""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time

import httpx
import openai
import pytest

from tests.forked import PATIENCE, Forked, address, listening, serving
from tests.server.http.test_listener import certificate  # noqa: F401  a fixture

PROMPT = "the quiet river flows under the old stone bridge and " * 40
LONG = {"prompt": "abc", "max_tokens": 400, "stream": True, "ignore_eos": True, "temperature": 0}


def started(*flags, **variables):
    """A server's process in an interpreter of its own."""
    command = [sys.executable, "-m", "headwater", "serve", "--memory", "200MB", *flags]
    environment = {**os.environ, **variables}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def server():
    """A server on a free port: the process, what it said at start-up, and a client."""
    with (
        listening(started("--port", "0")) as (process, said),
        openai.OpenAI(base_url=address(said), api_key="none", timeout=PATIENCE) as client,
    ):
        yield process, said, client


def test_service_manager_hears_of_proof_readiness_and_end(tmp_path):
    path, heard = str(tmp_path / "notify"), []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.settimeout(PATIENCE)
        manager.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        variables = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "2000000"}
        with serving("--port", "0", "--recheck", **variables) as (process, said):
            while "WATCHDOG=1" not in heard:
                heard.append(manager.recv(10_000).decode())
            process.send_signal(signal.SIGTERM)
            while not heard[-1].startswith("STOPPING=1"):
                heard.append(manager.recv(10_000).decode())
    assert heard[0].startswith("STATUS=loading")
    assert re.fullmatch(r"STATUS=proving that a hit changes no bit: \d+ of \d+ checks done", heard[1])
    (ready,) = (line for line in heard if line.startswith("READY=1"))
    assert ready == f"READY=1\nSTATUS=serves headwater-tiny on {address(said)}"
    assert heard[-1] == "STOPPING=1\nSTATUS=stopping: no request is running"


def test_json_logs_are_the_only_output_and_name_the_url():
    with Forked("serve", "--memory", "200MB", "--port", "0", "--log-format", "json", HEADWATER_PROT="1") as process:
        try:
            lines = [json.loads(process.stderr.readline())]
            while not lines[-1]["message"].startswith("Deterministic: "):
                lines.append(json.loads(process.stderr.readline()))
            url = address([line["message"] for line in lines])
            assert httpx.get(f"{url.removesuffix('/v1')}/health/ready", timeout=PATIENCE).json() == {"status": "ok"}
            process.terminate()
            out, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    lines += map(json.loads, err.splitlines())
    assert out == ""
    assert (lines[0]["level"], "HEADWATER_PROT" in lines[0]["message"]) == ("warning", True)
    assert lines[-1]["message"] == "stopping: no request is running"


def computed(said, what):
    """Tokens that a server has computed for something, as soon as there are any; 0 if there are none after all."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        metrics = httpx.get(f"{address(said).removesuffix('/v1')}/metrics").text
        tokens = float(re.search(rf'headwater_computed_tokens_total{{kind="{what}"}} (\S+)', metrics)[1])
        if tokens:
            return tokens
        time.sleep(0.05)
    return 0.0


def test_embedded_model_serves_hits_keeps_answers_and_stops_on_sigterm(server):
    """Its template adds a space before an answer without one, and its answers begin with a space: they are kept."""
    process, said, client = server
    assert re.fullmatch(r"Headwater \S+: no model given, loading headwater-tiny: .*\n", said[0])
    assert re.fullmatch(r"Computing in (float32|bfloat16): this CPU .*\n", said[1])
    health = httpx.get(f"{address(said).removesuffix('/v1')}/health").json()
    assert re.fullmatch(rf"Weights are held in {health['weights']}, as stored: \S+ MB\n", said[2])
    assert re.fullmatch(r"--weights would save: int8 \S+ MB \(\d+%\), int4 \S+ MB \(\d+%\)\n", said[3])
    page = address(said).removesuffix("v1")
    assert said[-2] == f"Live page: {page}, chat: {page}chat\n"
    assert said[-1] == f"Deterministic: yes, proven {health['proven'][:16].replace('T', ' ')} UTC\n"
    messages = [{"role": "user", "content": PROMPT}]
    asked = {"max_tokens": 130, "temperature": 0, "extra_body": {"ignore_eos": True}}
    client.chat.completions.create(model="any", messages=messages, **asked)
    assert computed(said, "answer") > 64
    first, again = (
        client.completions.create(model="any", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=1) for _ in "12"
    )
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens
    assert again.choices[0].logprobs.token_logprobs == first.choices[0].logprobs.token_logprobs
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert re.search(r"completion\[0\] .*reason=cold .*\n.*completion\[0\] .*reason=full ", log), log
    assert "Traceback" not in log


@pytest.mark.full
def test_proof_is_kept_for_the_next_start_and_recheck_proves_again(tmp_path):
    """Each start proves its settings once; the second one finds the proof of the first."""
    kept = {"HEADWATER_CACHE_DIR": str(tmp_path / "cache")}
    proving = []
    for flags in ((), (), ("--recheck",), ("--threads", "1")):
        with serving("--port", "0", *flags, **kept) as (_, said):
            proving.append(sum(line.startswith("Proving ") for line in said))
    assert proving == [1, 0, 1, 1 if os.environ.get("OMP_NUM_THREADS") != "1" else 0]


def events(lines):
    """The JSON of a stream's events; it must end with [DONE]."""
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


@pytest.mark.full
def test_after_sigterm_a_stream_is_finished_and_nothing_new_begun():
    with serving("--port", "0") as (process, said):
        url = address(said)
        with httpx.stream("POST", f"{url}/completions", json=LONG, timeout=PATIENCE) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            try:
                while (health := httpx.get(f"{url.removesuffix('/v1')}/health")).status_code == 200:
                    pass  # until the signal has been taken
                assert health.json()["status"] == "draining"
                refused = httpx.post(f"{url}/completions", json={"prompt": "abc"})
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            except httpx.ConnectError:
                pass  # the stream was over by then, and the server with it
            answer = events([first, *lines])
        assert answer[-1]["choices"][0]["finish_reason"] == "length"
        assert not any("error" in event for event in answer)
        _, log = process.communicate(timeout=PATIENCE)
        assert (process.returncode, "Traceback" in log) == (0, False), log


@pytest.mark.full
def test_behind_a_unix_socket_with_a_key_and_without_time_to_drain(tmp_path):
    (tmp_path / "key").write_text("sesame\n")
    (tmp_path / "hw.toml").write_text('uds = "hw.sock"\napi_key_file = "key"\ndrain = 0\nmodel_name = "small"')
    path = tmp_path / "hw.sock"
    with serving(HEADWATER_CONFIG=str(tmp_path / "hw.toml")) as (process, said):
        assert f"on unix:{path}" in said[-2]
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://headwater", timeout=PATIENCE) as client:
            assert client.get("/health").status_code == 200
            assert client.get("/v1/models").status_code == 401
            client.headers["authorization"] = "Bearer sesame"
            assert client.get("/v1/models").status_code == 200
            with client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 5000}) as stream:
                lines = stream.iter_lines()
                first = next(lines)
                process.send_signal(signal.SIGTERM)
                answer = events([first, *lines])
        assert "stopped" in answer[-1]["error"]["message"]
        _, log = process.communicate(timeout=PATIENCE)
        assert (process.returncode, "Traceback" in log) == (0, False), log
        assert not path.exists()


@pytest.mark.full
def test_behind_tls_and_interrupted_twice(certificate):  # noqa: F811
    key, cert = certificate
    with listening(started("--port", "0", "--tls-key", str(key), "--tls-cert", str(cert))) as (process, said):
        url = address(said)
        assert url.startswith("https://")
        with (
            httpx.Client(verify=ssl.create_default_context(cafile=str(cert)), timeout=PATIENCE) as client,
            client.stream("POST", f"{url}/completions", json={**LONG, "max_tokens": 5000}) as stream,
        ):
            lines = stream.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGINT)
            while client.get(f"{url.removesuffix('/v1')}/health").status_code == 200:
                pass  # until the signal has been taken
            process.send_signal(signal.SIGINT)
            answer = events([first, *lines])
        assert "stopped" in answer[-1]["error"]["message"]
        _, log = process.communicate(timeout=PATIENCE)
        assert (process.returncode, "Traceback" in log) == (130, False), log


@pytest.mark.full
def test_sigterm_while_loading_ends_the_server_cleanly(tmp_path):
    with started("--uds", str(tmp_path / "hw.sock")) as process:
        assert "no model given" in process.stdout.readline()  # said before the model is loaded
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE)
    assert (process.returncode, "Traceback" in log) == (0, False), log
    assert not (tmp_path / "hw.sock").exists()
