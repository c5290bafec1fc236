"""The comparison of servers: what counts as a stream's speed, and the table of figures."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import threading

import pytest

from benchmarks import measure, peer_answers, peers
from benchmarks.measure import Row
from benchmarks.peers import Running, Wanted, cached_of, compared, markdown
from benchmarks.servers import Streamed


def running() -> Running:
    """A server whose process is this one."""
    return Running("ours", "serve", 0, lambda: [os.getpid()], random.Random(0), [5, 6, 7])


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
    monkeypatch.setattr(peers, "complete", lambda port, prompt: answer(0.25))
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
