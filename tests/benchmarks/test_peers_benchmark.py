"""Benchmarks against other engines and other tiers, in small."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import measure, peer_answers, peers, tier_peers
from benchmarks.measure import Row
from benchmarks.peers import Running, Wanted, cached_of, compared, markdown
from benchmarks.servers import Streamed
from benchmarks.tier_peers import RefusedError, first_error, peer, restart, sessions, taken


def running() -> Running:
    """A server whose process is this one."""
    return Running("ours", "serve", 0, True, lambda: [os.getpid()], random.Random(0), [5, 6, 7])


def answer(*times: float, cached: int = 0) -> Streamed:
    return Streamed(0.0, {0: list(times)}, {}, {"prompt_tokens_details": {"cached_tokens": cached}})


def test_server_is_read_from_the_command_line() -> None:
    wanted = Wanted.read("before=../old folder --weights int8")
    assert (wanted.name, wanted.where, str(wanted.model)) == ("before", "../old", "folder")
    assert wanted.flags == ("--weights", "int8")
    for text in ("folder", "name=folder"):
        with pytest.raises(argparse.ArgumentTypeError, match="NAME=WHERE MODEL"):
            Wanted.read(text)


def test_streams_are_measured_while_all_of_them_run(monkeypatch: pytest.MonkeyPatch) -> None:
    by_prompt = {1: answer(*(0.5 + 0.1 * i for i in range(8))), 2: answer(*(0.1 * i for i in range(8)))}
    monkeypatch.setattr(peers, "complete", lambda port, prompt, n=1: by_prompt[prompt[0]])
    # from 0.5 s, when the second stream has begun, to 0.7 s, when the first has ended: two tokens of each
    assert running().streams([[1], [2]], 8) == pytest.approx(4 / 0.2)


def test_streams_that_do_not_overlap_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    by_prompt = {1: answer(0.0, 0.1), 2: answer(0.2, 0.3)}
    monkeypatch.setattr(peers, "complete", lambda port, prompt, n=1: by_prompt[prompt[0]])
    with pytest.raises(RuntimeError, match="did not overlap"):
        running().streams([[1], [2]], 2)


def test_cold_prompt_must_miss_and_the_same_again_must_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def complete(port: int, prompt: list[int], max_tokens: int = 1) -> Streamed:
        asked.append(prompt)
        return answer(0.25, cached=0 if asked.count(prompt) == 1 else len(prompt) - 4)

    monkeypatch.setattr(peers, "complete", complete)
    server = running()
    assert (server.cold(128), server.resend(128)) == (250.0, 250.0)
    assert asked[0] == asked[1]
    server.rng = random.Random(0)  # the same prompt
    with pytest.raises(RuntimeError, match="124 of 128 tokens never seen were cached"):
        server.cold(128)
    monkeypatch.setattr(peers, "complete", lambda port, prompt, n=1: answer(0.25))
    with pytest.raises(RuntimeError, match="0 of 128 tokens sent again were cached"):
        server.resend(128)


def test_health_is_asked_until_the_last_stream_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    seconds = itertools.count(1)

    def health_seconds(port: int) -> float:
        asked = next(seconds)
        if asked == 100:
            ended.set()
        return asked / 1e3

    def complete(port: int, prompt: list[int], max_tokens: int = 1) -> Streamed:
        assert (len(prompt), max_tokens) == (3, 16)
        assert ended.wait(60)
        return answer(0.25)

    monkeypatch.setattr(peers, "health_seconds", health_seconds)
    monkeypatch.setattr(peers, "complete", complete)
    monkeypatch.setattr(peers, "ASKED_EVERY", 0)
    assert 99 <= running().health(2, 3, 16) <= next(seconds)  # milliseconds: 100 answers at least, 1 to 100 and more


def test_server_that_reports_no_cached_tokens_has_none() -> None:
    assert cached_of(Streamed(0.0, {}, {}, {"prompt_tokens_details": None})) == 0


def test_first_server_is_compared_with_each_other_one() -> None:
    times = {"ours": [1.0, 2.0], "theirs": [2.0, 2.0]}
    assert [row.values for row in compared("cold", "ms", times)] == [[2.0, 1.0]]
    assert [row.values for row in compared("stream", "tokens/s", times)] == [[0.5, 1.0]]


def test_table_has_medians_with_least_and_most() -> None:
    rows = [
        Row("cold: ours", "ms", [1.0, 2.0, 4.0]),
        Row("cold: theirs", "ms", [8.0, 8.0]),
        Row("cold: ours / theirs, speed", "x", [4.0]),
        Row("resident: ours", "MB", [500.0]),
    ]
    assert markdown(rows, ["ours", "theirs"]).splitlines() == [
        "| | ours | theirs |",
        "| --- | --- | --- |",
        "| cold, ms | 2.000 [1.000, 4.000] | 8.000 |",
        "| resident, MB | 500 |  |",
    ]


@pytest.mark.parametrize(("warm_up", "expected"), [(True, [2.0, 3.0]), (False, [1.0, 2.0])])
def test_warm_up_round_does_not_count(warm_up: bool, expected: list[float]) -> None:
    counted = iter(range(1, 10))
    assert measure.in_turns({"one": lambda: float(next(counted))}, 2, warm_up=warm_up) == {"one": expected}


def test_server_that_is_up_is_a_name_and_a_port() -> None:
    assert peer_answers.named_port("vllm-ngram=18081") == ("vllm-ngram", 18081)
    for text in ("vllm", "=18081", "vllm=here"):
        with pytest.raises(argparse.ArgumentTypeError, match="NAME=PORT"):
            peer_answers.named_port(text)


def test_answers_count_the_tokens_that_the_server_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts are sent once before, for one token; then all of them at once, to their own ends."""
    asked: list[tuple[list[int], int]] = []

    def complete(port: int, prompt: list[int], max_tokens: int = 1, ignore_eos: bool = True) -> Streamed:
        asked.append((prompt, max_tokens))
        assert ignore_eos == (max_tokens == 1)
        return Streamed(0.0, {}, {}, {"completion_tokens": 5})

    clock = itertools.count(0, 2)
    monkeypatch.setattr(peer_answers, "complete", complete)
    monkeypatch.setattr(peer_answers, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(peer_answers, "sleep", lambda seconds: None)
    assert peer_answers.rate(1, [[1], [2], [3]], 2) == 15 / 2
    assert asked[:3] == [([1], 1), ([2], 1), ([3], 1)]
    assert sorted(asked[3:]) == [([n], peer_answers.LONGEST) for n in (1, 2, 3)]


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
        server = Running("ours", "serve", 0, True, list, random.Random(0), [])
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


def test_recorded_command_has_no_folder_of_the_machine() -> None:
    command = (
        """PYTHONPATH=/a/tree/src /a/venv/bin/python -m headwater serve --port 0 /m/q500 '{"model": "/m/q.gguf"}'"""
    )
    named = """PYTHONPATH=src python -m headwater serve --port 0 q500 '{"model": "q.gguf"}'"""
    assert peers.without_folders(command) == named


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
