"""Benchmarks of requests that resume at the token: figures of turns, and hits against earlier prompts and answers."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from benchmarks import file_peers, resume_peers, token_hits
from benchmarks.chat_load import Record
from benchmarks.peers import Running
from benchmarks.resume_peers import Resumed, again_rows, turn_rows
from benchmarks.servers import Streamed
from headwater.account import CacheAccount, Reason
from headwater.request import Boundaries, Generation, SamplingParams
from pages import measurements

WORDS = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)} | {"?": 100}, unk_token="?"))


class Server(Running):
    """A server that resumes `lost` tokens before the longest prompt or answer that it had; a token takes a second."""

    def __init__(self, name: str, is_ours: bool, lost: int) -> None:
        super().__init__(name, "serve", 0, is_ours, list, random.Random(0), list(range(100)))
        self.lost, self.had = lost, list[list[int]]()

    def ask(self, prompt: list[int], n_outputs: int = 1) -> Streamed:
        known = max((common(prompt, had) for had in self.had), default=0)
        computed = len(prompt) - max(0, known - self.lost)
        answer = [7] * n_outputs
        self.had.append(prompt + answer)
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": len(prompt) - computed}}
        return Streamed(0.0, {0: [computed, computed + 1.0]}, {}, usage, "w7" if n_outputs == 1 else "")


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.fixture
def talks(monkeypatch: pytest.MonkeyPatch) -> list[Resumed]:
    """The same conversation of 20 tokens with ours and with a peer; the prompt that is sent again has 30."""
    monkeypatch.setattr(resume_peers, "ANSWER", 1)
    monkeypatch.setattr(resume_peers, "refusal_seconds", lambda port, prompt: 0.002)
    return [Resumed.begun(server, WORDS, 20, 30) for server in (Server("ours", True, 0), Server("peer", False, 4))]


def test_next_turn_reports_computed_tokens_and_ratio(talks: list[Resumed]) -> None:
    rows = {row.name: row for row in turn_rows(talks, 2, 20, 8)}
    assert rows["8 new tokens after 20: computed: ours"].values == [8.0, 8.0]
    assert rows["8 new tokens after 20: computed: ours"].goal == "<= 8"
    assert rows["8 new tokens after 20: computed: peer"].values == [12.0, 12.0]
    assert rows["8 new tokens after 20: first token: ours / peer"].values == [8 / 12] * 2
    assert len(rows) == 5


def test_repeated_prompt_reports_second_token_and_http(talks: list[Resumed]) -> None:
    rows = {row.name: row.values for row in again_rows(talks, 1, 30)}
    assert rows["the same 30 tokens: first token: peer"] == [4000.0]
    assert rows["the same 30 tokens: second token: ours"] == [1000.0]
    assert rows["the same 30 tokens: computed: ours"] == [0.0]
    assert rows["the same 30 tokens: first token above HTTP: ours"] == [-2.0]
    assert "the same 30 tokens: HTTP: peer" not in rows


def test_answer_of_another_length_is_refused(talks: list[Resumed], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_peers, "ANSWER", 2)
    with pytest.raises(RuntimeError, match="peer: '' has 0 tokens, not 2"):
        Resumed.begun(talks[1].server, WORDS, 20, 30)


def record(prompt: int, known: int, cached: int, sent: int | None = None) -> Record:
    account = CacheAccount(prompt, cached, cached, 0, Reason.FULL)
    generation = Generation(tuple(range(prompt)), SamplingParams())
    return Record(generation, known if sent is None else sent, known, account=account)


def test_lost_hits_are_divided_by_cause() -> None:
    records = [record(100, 0, 0), record(100, 90, 64), record(200, 100, 80, sent=90), record(100, 90, 85)]
    rows = {row.name.removeprefix("raw: "): row for row in token_hits.rows_of("raw", [records], [1])}
    assert rows["hits"].values == [45.8]
    assert rows["possible hits"].values == [56.0]
    assert (rows["possible - measured"].values, rows["possible - measured"].met) == ([10.2], False)
    assert rows["possible - measured, where prompts first part"].values == [5.2]
    assert rows["possible - measured, turns before their answer was prefilled"].values == [2.0]
    assert rows["possible - measured, the rest"].values == [3.0]
    assert rows["answers with a differing bit"].met is False


def test_first_parting_is_where_no_prompt_left() -> None:
    first, again, turn = record(100, 0, 0), record(100, 90, 90), record(200, 100, 100)
    chat = record(120, 70, 70)
    chat = replace(chat, generation=replace(chat.generation, boundaries=Boundaries(system_end=70)))
    assert token_hits.first_partings([first, again, record(100, 90, 90), turn, chat]) == [again]


def test_page_has_a_column_for_each_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "RESULTS", tmp_path)
    rows = [{"name": f"again: first token: {name}", "unit": "ms", "values": [2.0, 3.0]} for name in ("ours", "peer")]
    rows += [{"name": "again: HTTP: ours", "unit": "ms", "values": [1.0]}, {"name": "ours / peer", "unit": "x"}]
    run = {"commands": {"ours": "", "peer": ""}, "about": "0.5 B", "commit": "abc"}
    (tmp_path / "resume_peers_half.json").write_text(json.dumps({"run": run, "rows": rows}))
    title, text = measurements.by_server("resume_peers_half")
    assert title == "Resumed at the token: 0.5 B"
    assert text.splitlines()[2:] == [
        "|  | ours | peer |",
        "| --- | --- | --- |",
        "| again: first token, ms | 2.50 [2.00, 3.00] | 2.50 [2.00, 3.00] |",
        "| again: HTTP, ms | 1.00 |  |",
    ]


def test_page_of_same_files_has_speeds_next_to_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "RESULTS", tmp_path)
    monkeypatch.setattr(Running, "streams", lambda server, prompts, n_outputs: 30.0 if server.is_ours else 20.0)
    monkeypatch.setattr(Running, "cold", lambda server, n_tokens: 50.0 if server.is_ours else 40.0)
    monkeypatch.setattr(Running, "resident_mb", lambda server, field: 7.0)
    given = argparse.Namespace(cold=512, prompt=9, outputs=4, seed=0, repeats=2)
    rows = list(file_peers.rows_of("Q3_K", [Server("ours", True, 0), Server("peer", False, 0)], given))
    assert [(row.goal, row.met) for row in rows if row.unit == "x"] == [(">= 1.0", False), (">= 1.0", True)]
    run = {"commands": {"ours": "", "peer": ""}, "processor": "AVX2", "commit": "abc"}
    (tmp_path / "file_peers.json").write_text(json.dumps({"run": run, "rows": [asdict(row) for row in rows]}))
    ((title, text),) = measurements.same_files()
    assert title.endswith("AVX2")
    assert text.splitlines()[4:] == [
        "|  | ours | peer | ours / peer |",
        "| --- | --- | --- | --- |",
        "| Q3_K: cold TTFT, 512 tokens, ms | 50.0 | 40.0 | 0.8 |",
        "| Q3_K: 1 stream of 4 tokens after 9 cached ones, tokens/s | 30.0 | 20.0 | 1.50 |",
        "| Q3_K: resident at its peak, MB | 7.00 | 7.00 |  |",
    ]
