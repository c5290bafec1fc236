"""`headwater report`: a day from Prometheus, from a server's metrics, or from a recording."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest

from headwater.account import REMEDIES, Reason
from headwater.cli import run
from headwater.models.files import EMBEDDED_FOLDER
from headwater.traces.recordings import PageHashes, Served, line_of
from headwater.traces.request import Request

PAGE = """# HELP headwater_requests_total Finished requests.
headwater_requests_total{endpoint="chat",outcome="ok"} 90.0
headwater_requests_total{endpoint="completion",outcome="ok"} 10.0
headwater_requests_total{endpoint="chat",outcome="refused"} 7.0
headwater_prompt_tokens_total 200000.0
headwater_cached_tokens_total 150000.0
headwater_misses_total{reason="cold"} 12.0
headwater_misses_total{reason="evicted"} 3.0
headwater_misses_total{reason="no_checkpoint"} 0.0
"""
DAY = datetime(2031, 5, 1, tzinfo=UTC)


@contextmanager
def answering(queries: list[dict[str, list[str]]] | None) -> Iterator[str]:
    """Serve PAGE, and with a list of queries, which gets those that arrive, Prometheus' API."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlparse(self.path)
            body = {"/metrics": PAGE}.get(url.path) if queries is None else self.result(parse_qs(url.query))
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write((body or "").encode())

        def result(self, query: dict[str, list[str]]) -> str:
            assert queries is not None
            queries.append(query)
            (text,) = query["query"]
            rows = {"by (reason)": [("cold", 12.4), ("evicted", 3.1)], "prompt_tokens": [("", 200_000.2)]}
            rows |= {"cached_tokens": [("", 150_000)], "requests": [("", 99.8)]}
            found = next((one for part, one in rows.items() if part in text), [])
            series = [{"metric": {"reason": name} if name else {}, "value": [0, str(n)]} for name, n in found]
            return json.dumps({"status": "success", "data": {"resultType": "vector", "result": series}})

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["report", *arguments]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    return out


@pytest.mark.parametrize("path", ["", "/", "/metrics"])
def test_metrics_page_of_a_server_is_reported_since_its_start(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(None) as url:
        out = printed(capsys, url + path, "--html", str(tmp_path / "day.html"))
    assert "since the server's start: 100 requests\n150,000 of 200,000 prompt tokens" in out
    assert "(75.0%)" in out
    assert re.search(r"cold +│ +12 │ +12.0% │", out)
    assert "no_checkpoint" not in out
    assert "3 prompts missed for want of memory" in out
    html = (tmp_path / "day.html").read_text()
    assert "<script" not in html
    for text in ("75.0%", "cold", REMEDIES[Reason.EVICTED], "3 prompts missed for want of memory"):
        assert text in html


def test_prometheus_is_asked_for_the_whole_of_yesterday_or_the_day(capsys: pytest.CaptureFixture[str]) -> None:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    for arguments, end in (([], today), (["--day", "2031-05-01"], DAY + timedelta(days=1))):
        queries: list[dict[str, list[str]]] = []
        with answering(queries) as url:
            out = printed(capsys, url, *arguments)
        assert f"{end - timedelta(days=1):%Y-%m-%d}: 100 requests" in out
        assert re.search(r"evicted +│ +3 │", out)
        times = {float(query["time"][0]) for query in queries if "time" in query}
        assert times in ({end.timestamp()}, {(end + timedelta(days=1)).timestamp()})  # midnight came between
        assert 'increase(headwater_requests_total{outcome="ok"}[1d])' in str(queries)


def recording(path: Path) -> Path:
    """Write a recording of two days: on the first, 60 chats of two turns share a system prompt."""
    served = Served(64, "headwater-tiny", json.loads((EMBEDDED_FOLDER / "config.json").read_text()), "float32")
    hashes, lines = PageHashes(b"key", 64), [served.first_line()]
    for number in range(61):
        at = DAY.timestamp() + 600 * number + (86_400 if number == 60 else 0)
        shared = [1] * 640
        for turn, tokens in enumerate((960, 1280)):
            prompt = shared + [number + 2] * (tokens - 640)
            request = Request("", hashes.of("", prompt), tokens, 8, tokens, at + turn)
            lines.append(line_of(request, []))
    path.write_bytes(b"".join(lines))
    return path


def test_recording_is_replayed_and_memory_that_would_have_paid_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recording(tmp_path / "day.trace")
    out = printed(capsys, str(file), "--memory", "4MB", "--jobs", "1", "--html", str(tmp_path / "day.html"))
    assert "the recording: 122 requests" in out
    few = printed(capsys, str(file), "--memory", "4MB", "--jobs", "1", "--day", "2031-05-01")
    assert "2031-05-01: 120 requests" in few
    for text in (out, few):
        assert "4 MB saves" in text
        assert re.search(r"[\d.]+ GB reach \d+% of infinite memory's hits", text)
        assert "diverged" in text
    assert "of infinite memory&#39;s hits" in (tmp_path / "day.html").read_text()
    assert run(["report", str(file), "--day", "2031-05-03"]) == 2
    assert "the recording has 2031-05-01 to 2031-05-02" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:9"], "http://127.0.0.1:9 cannot be read"),
        (["http://127.0.0.1:9", "--day", "today"], "day is 'today', must be a date such as"),
        (["rag(sessions=2)"], "is not a recording"),
        (["nothing.trace"], "nothing.trace"),
    ],
)
def test_source_that_cannot_be_read_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_day_of_a_servers_page_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(None) as url:
        assert run(["report", url, "--day", "2031-05-01"]) == 2
    assert "is a server, which counts since its start" in capsys.readouterr().err


def test_each_reason_has_a_remedy_and_a_row_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "trouble.md").read_text()
    assert set(REMEDIES) == {*Reason} == {*re.findall(r"^\| `(\w+)` \|", page.split("\n## ")[1], re.MULTILINE)}
