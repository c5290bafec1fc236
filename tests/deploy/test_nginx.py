"""Streams behind a real nginx, whose patience is shorter than a prefill."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.http.test_draining import FOREVER, PATIENCE, started
from tests.server.http.test_waiting import BODIES, TIMES, keep_alive

pytestmark = pytest.mark.full
READ_TIMEOUT, PREFILL_SECONDS = 1, 2
KEPT_ALIVE = {"stream_start": 0.3, "keep_alive": 0.3}
SILENT = {"stream_start": FOREVER, "keep_alive": FOREVER}
# of a user's, with nginx's own defaults: answers are buffered unless their headers say otherwise
CONFIGURATION = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/bodies; proxy_temp_path {folder}/answers;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass {url}; proxy_http_version 1.1; proxy_read_timeout {timeout}s; }}
  }}
}}
"""


@contextmanager
def nginx(folder, url):
    """Run an nginx in front of `url`; yields its own."""
    binary = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if binary is None:
        pytest.skip("there is no nginx here")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    settings = folder / "nginx.conf"
    settings.write_text(CONFIGURATION.format(folder=folder, port=port, url=url, timeout=READ_TIMEOUT))
    process = subprocess.Popen([binary, "-p", folder, "-c", settings], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + PATIENCE
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture
def engine():
    """Return an engine whose first prefill takes PREFILL_SECONDS, unless it is cancelled."""
    fake = FakeEngine(hold_after=0)
    fake.start()

    def release():
        fake.held.wait(PATIENCE)
        fake.was_cancelled.wait(PREFILL_SECONDS)
        fake.was_cancelled.set()

    threading.Thread(target=release, daemon=True).start()
    yield fake
    fake.stop()


@pytest.fixture
def running(engine):
    with started(engine, engine.was_cancelled.set) as start:
        yield start


@pytest.mark.parametrize("path", BODIES)
def test_long_prefill_behind_nginx_succeeds_with_keep_alives(running, engine, tmp_path, path):
    body = {**BODIES[path], "stream": True}
    with (
        nginx(tmp_path, running(**KEPT_ALIVE).url) as url,
        httpx.stream("POST", f"{url}{path}", json=body, timeout=PATIENCE) as response,
    ):
        pieces = response.iter_text()
        first = next(pieces)
        assert not engine.was_cancelled.is_set()  # nothing is buffered
        text = TIMES.sub("", first + "".join(pieces))
    assert response.status_code == 200
    assert text.count(keep_alive(path)) >= 3
    assert '"resumed_at":0' in text  # of the account, at its end
    assert engine.cancelled == []


def test_long_prefill_behind_nginx_fails_without_keep_alives(running, engine, tmp_path):
    path = "/v1/chat/completions"
    with nginx(tmp_path, running(**SILENT).url) as url:
        response = httpx.post(f"{url}{path}", json={**BODIES[path], "stream": True}, timeout=PATIENCE)
    assert response.status_code == 504
    assert engine.was_cancelled.wait(PATIENCE)
    assert engine.cancelled == [0]
