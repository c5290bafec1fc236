"""The comparison of tiers with other servers' stores: figures of a restart and of sessions, and peers that refuse."""

from __future__ import annotations

import argparse
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import peers, tier_peers
from benchmarks.measure import Row
from benchmarks.peers import Running
from benchmarks.servers import Streamed
from benchmarks.tier_peers import RefusedError, first_error, peer, restart, sessions, taken

LOG = """(APIServer pid=1) WARNING 11-26 22:24:37 [system_utils.py:255] Found ulimit: `OSError: [Errno 24] Too many
(EngineCore pid=2) ERROR 11-26 22:27:32 [core.py:1510]     raise RuntimeError(
(EngineCore pid=2) ERROR 11-26 22:27:32 [core.py:1510] ValueError: no store here: "ask, for another"
RuntimeError: Engine core initialization failed.
"""


class Server:
    """A server that keeps the prompts that it is sent, and forgets them when it is started again without a store."""

    def __init__(self, folder: Path, keeps: bool) -> None:
        self.folder, self.keeps = folder, keeps
        self.had: list[list[int]] = []
        self.starts = 0

    @contextmanager
    def start(self) -> Iterator[Running]:
        self.starts += 1
        if not self.keeps:
            self.had = []
        server = Running("ours", "serve", 0, list, random.Random(0), [])
        server.ask = self.ask  # type: ignore[method-assign]
        yield server

    def ask(self, prompt: list[int]) -> Streamed:
        cached = max((len(had) for had in self.had if prompt[: len(had)] == had), default=0)
        self.had.append(list(prompt))
        (self.folder / "part").write_bytes(bytes(1_000_000))
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": cached}}
        return Streamed(0.0, {0: [len(prompt) - cached]}, {}, usage)


def draw(n_tokens: int) -> list[int]:
    return [random.randrange(1, 10**9) for _ in range(n_tokens)]


def values(rows: Iterator[Row]) -> dict[str, list[float]]:
    return {row.name: row.values for row in rows}


@pytest.mark.parametrize(("keeps", "cached"), [(True, 100), (False, 0)])
def test_prompt_is_sent_again_with_one_token_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool, cached: int
) -> None:
    server, killed = Server(tmp_path, keeps), list[int]()
    monkeypatch.setattr(tier_peers, "kill", lambda running: killed.append(server.starts))
    figures = values(restart(server.start, tmp_path, draw(100), 2, draw, slot_files=False))
    assert figures == {
        "computed: TTFT: ours": [1e5],
        "stored: ours": [1.0],
        "after a restart: TTFT: ours": [1e3 * (101 - cached)] * 2,
        "after a restart: cached: ours": [cached, cached],
    }
    assert killed == [1, 2, 3]


def test_client_saves_a_slot_at_the_end_and_restores_it_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, seen = Server(tmp_path, keeps=False), list[tuple[str, int, int]]()

    def slot_file(port: int, action: str) -> float:
        seen.append((action, server.starts, len(server.had)))
        return 7.0

    monkeypatch.setattr(tier_peers, "slot_file", slot_file)
    figures = values(restart(server.start, tmp_path, draw(100), 2, draw, slot_files=True))
    assert seen == [("save", 1, 2), ("restore", 2, 1), ("restore", 3, 1)]
    assert figures["slot saved by a request: ours"] == [7.0]
    assert figures["slot restored by a request: ours"] == [7.0, 7.0]


def test_first_turn_of_sessions_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Running, "resident_mb", lambda server, field: 1.0)
    begin = [draw(6), draw(6)]
    figures = values(sessions(Server(tmp_path, keeps=True).start, begin, [[draw(4), draw(4)] for _ in range(3)]))
    assert figures["2 sessions in turns: hits: ours"] == [pytest.approx(100 * (10 + 14) / (14 + 18))]
    assert figures["2 sessions in turns: TTFT, p50: ours"] == [4e3]
    assert [len(prompt) for prompt in begin] == [6, 6]


def test_first_error_is_the_processes_own_without_its_prefix() -> None:
    assert first_error(LOG) == 'ValueError: no store here: "ask, for another"'
    assert first_error("loading\nKilled\n") == "Killed"
    assert first_error("") == "no log"


class NoSlots(BaseHTTPRequestHandler):
    """llama.cpp's answers, to requests for a slot, without `--slot-save-path`."""

    def do_POST(self) -> None:
        self.send_response(501)
        self.end_headers()
        self.wfile.write(b"not supported")


def test_slot_that_cannot_be_saved_is_a_refusal() -> None:
    with HTTPServer(("127.0.0.1", 0), NoSlots) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(RefusedError, match="save of a slot answered 501: not supported"):
            tier_peers.slot_file(server.server_port, "save")


class Ends:
    """A peer that writes a log and does not start."""

    def __init__(self, kind: str, model: Path, log: str, **options: object) -> None:
        Path(log).write_text(LOG)

    def __enter__(self) -> Ends:
        raise SystemExit("vllm ended with 1")

    def __exit__(self, *_: object) -> None: ...


def given_environment(monkeypatch: pytest.MonkeyPatch, environment: Path) -> argparse.Namespace:
    """Options of a run whose peers are installed in this environment, and do not start."""
    runner = SimpleNamespace(Peer=Ends, VENV=dict.fromkeys(("llamacpp", "vllm"), str(environment)))
    for module in (peers, tier_peers):
        monkeypatch.setattr(module, "peer_runner", lambda folder: runner)
    return argparse.Namespace(peers=Path(), model=Path(), gguf=Path(), threads=1, length=100)


def test_peers_that_are_not_installed_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_environment(monkeypatch, tmp_path / "none")
    said = tier_peers.offloading(given)
    assert set(said.values()) == {f"not installed: there is no {tmp_path / 'none'}/bin/python"}
    assert tier_peers.versions(given) == {}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    given = given_environment(monkeypatch, tmp_path)
    with (
        pytest.raises(RefusedError, match=r"^not installed: .*/bin/python has no lmcache$"),
        peer(given, "lmcache", given.model),
    ):
        pass


def test_peer_that_does_not_start_costs_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_environment(monkeypatch, tmp_path)
    monkeypatch.setattr(tier_peers, "version", lambda given, package: "1")
    refusals: dict[str, str] = {}
    start = lambda: tier_peers.llama_cpp(given, 1, 100)  # noqa: E731
    assert taken(restart(start, tmp_path, draw(9), 1, draw, slot_files=True), "llama.cpp", refusals) == []
    assert refusals == {"llama.cpp": first_error(LOG)}
    assert set(tier_peers.offloading(given).values()) == {first_error(LOG)}
