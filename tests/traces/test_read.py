"""Reading of traces by their names, and traces over others."""

import json
import statistics
import time
from itertools import pairwise
from pathlib import Path

import pytest

from headwater.errors import ConfigError, TraceError
from headwater.traces.arrivals import in_order
from headwater.traces.loads import Azure, ServeGen, _Client, make_arrivals
from headwater.traces.read import make_trace, read_trace
from headwater.traces.request import Request, Trace
from headwater.traces.source import Source

LINE = "[1, 2, 3]\n"


@pytest.fixture
def folder(tmp_path):
    for name in (
        "agent/sessions.jsonl",
        "moon/chat_trace.jsonl",
        "moon/made_trace.jsonl",
        "flat.json",
        "agent/README.md",
    ):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(LINE)
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("agent", "agent"),
        ("agent/sessions.jsonl", "agent/sessions"),
        ("moon/chat_trace.jsonl", "moon/chat_trace"),
        ("moon/chat_trace", "moon/chat_trace"),
        ("moon/chat", "moon/chat"),
        ("flat", "flat"),
    ],
)
def test_a_trace_is_found_by_its_name(folder, asked, name):
    assert read_trace(Path(asked), data=folder).name == name


def test_file_is_found_without_a_data_folder_and_preferred(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("flat.json").write_text(LINE * 2)
    assert len(read_trace(Path("flat.json"), data=folder).requests) == 2
    assert read_trace(folder / "moon" / "chat_trace.jsonl").name == "chat_trace"
    assert read_trace(Path("data/../flat.json")).name == "flat"


def test_ambiguous_name_is_an_error_with_the_candidates(folder):
    with pytest.raises(TraceError, match=r"moon is 2 files, must be one of chat_trace, made_trace"):
        read_trace(Path("moon"), data=folder)


@pytest.mark.parametrize("asked", ["nowhere", "agent/nothing", "no/where"])
def test_unknown_name_is_an_error(folder, asked):
    with pytest.raises(TraceError, match=rf"{asked} is not a file, nor is there one below .*data"):
        read_trace(Path(asked), data=folder)


@pytest.mark.parametrize("asked", ["nowhere", "generated"])
def test_name_without_a_data_folder_is_an_error_with_the_options(asked):
    with pytest.raises(TraceError, match=rf"^{asked} is not a file, and .* \(--data FOLDER\); .*: generated\(0\)$"):
        make_trace(asked)


@pytest.mark.parametrize(
    ("first", "fields", "nearest"),
    [
        ({"a": 1}, "it has 'a'", ""),
        ({"hash_ids": [1], "timestamp": 0}, "it has 'hash_ids', 'timestamp'", "Qwen-Bailian .*; Mooncake .*timestamp"),
        ("when,ContextTokens", "it is not JSON", "Azure .*TIMESTAMP, ContextTokens"),
        (7, "it has no fields", ""),
    ],
)
def test_unknown_format_is_an_error_with_fields_and_nearest_formats(written, first, fields, nearest):
    message = rf"line 1: .* is of no format that is known: {fields}; nearest are .*{nearest}.*; `headwater replay"
    with pytest.raises(TraceError, match=message):
        read_trace(written(first))


@pytest.mark.parametrize("lines", [(), ("", " "), ({"conversations": []},)])
def test_file_without_requests_is_an_error(written, lines):
    with pytest.raises(TraceError, match=r"some\.jsonl has 0 requests, at least 1 is needed"):
        read_trace(written(*lines))


def test_a_limit_counts_sessions_and_keeps_them_whole(written):
    lines = [{"session": name, "input": [1, number]} for number, name in enumerate("ababcab")]
    trace = read_trace(written(*lines), limit=2)
    assert [one.session for one in trace.requests] == list("ababab")


def test_requests_after_the_limit_are_not_read(written):
    chat = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}] * 2}
    path = written(chat, chat, chat, "{oops")
    assert len(read_trace(path, limit=2).requests) == 4
    with pytest.raises(TraceError, match="line 4"):
        read_trace(path)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.6805900,396,2
2023-11-16 18:15:51.1805900,879,55
"""
BURST = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.0,a,1,GPT-4,100,60,160,Conversation log
45.0,a,1,GPT-4,200,10,210,Conversation log
50.0,,1,ChatGPT,300,0,300,API log
"""
CLIENT = {
    "trace": [[0, 5.0, 1.0, "Gamma", 1.0, 0.2], [600, 20.0, 3.0, "Weibull", 0.4, 0.01]],
    "dataset": {"0": {"input_tokens": {"7": 1.0}, "output_tokens": {"1": 0.25, "3": 0.75}}},
}


@pytest.fixture
def file(tmp_path):
    (tmp_path / "azure.csv").write_text(AZURE)
    (tmp_path / "gen.jsonl").write_text(json.dumps(CLIENT) + "\n" + json.dumps(CLIENT) + "\n")
    return tmp_path


def trace(n=4, session="s{}"):
    return Trace("t", [Request(session.format(number), b"0123" * 9, 5, 4, 9, float(number)) for number in range(n)])


def test_azures_rows_are_points(file):
    points = list(Azure.read(Source(file / "azure.csv"), 0))
    assert [point.at for point in points] == pytest.approx([0.0, 4.0, 4.5])
    assert [(point.input_tokens, point.output_tokens) for point in points] == [(374, 44), (396, 2), (879, 55)]


@pytest.mark.parametrize("zone", ["UTC", "America/Los_Angeles", "Asia/Kolkata"])
def test_azures_times_are_in_utc_with_any_fraction_of_a_second(tmp_path, monkeypatch, zone):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    rows = "2024-05-10 00:00:00.009930+00:00,10,5", "2024-05-10 00:00:01+00:00,10,5", "2024-05-10 00:00:02.5+00:00,10,5"
    (tmp_path / "azure.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    points = list(Azure.read(Source(tmp_path / "azure.csv"), 0))
    monkeypatch.undo()
    time.tzset()
    assert [point.at for point in points] == pytest.approx([0.0, 0.99007, 2.49007])


def test_burstgpts_rows_are_points(tmp_path):
    (tmp_path / "burst.csv").write_text(BURST)
    times = [at for at, _ in in_order(make_arrivals(trace(3), "like('burst', lengths=True)", data=tmp_path))]
    assert times == [0.0, 40.0, 45.0]


def test_servegens_windows_have_their_rates_shapes_and_lengths(file):
    points = list(ServeGen.read(Source(file / "gen.jsonl"), 0))
    first = [point.at for point in points if point.at < 600]
    second = [point.at for point in points if point.at >= 600]
    assert first + second == [point.at for point in points] == sorted(first + second)
    assert len(first) == pytest.approx(2 * 5 * 600, rel=0.05)
    assert len(second) == pytest.approx(2 * 20 * 600, rel=0.1)
    own = list(_Client(CLIENT, __import__("random").Random(1)).points())
    gaps = [b.at - a.at for a, b in pairwise(own) if a.at >= 600]
    assert statistics.stdev(gaps) / statistics.fmean(gaps) > 2  # a Weibull of 0.4 has 3.1
    assert {point.input_tokens for point in points} == {7}
    assert statistics.fmean(point.output_tokens for point in points) == pytest.approx(2.5, rel=0.02)


def test_requests_come_at_the_files_times(file):
    came = list(in_order(make_arrivals(trace(3), "like('azure', speed=2)", data=file)))
    assert [at for at, _ in came] == pytest.approx([0.0, 2.0, 2.25])
    assert [one.session for _, one in came] == ["s0", "s1", "s2"]


def test_a_session_still_waits_for_its_answers(file):
    arrivals = make_arrivals(trace(3, "one"), "like('azure')", data=file)
    arrivals.answered(arrivals.take(), 100.0)
    assert arrivals.due() == 100.0


def test_short_file_repeats_from_its_beginning(file):
    times = [at for at, _ in in_order(make_arrivals(trace(8), "like('azure')", data=file))]
    turn = 4.5 * 3 / 2
    assert times == pytest.approx([0.0, 4.0, 4.5, turn, turn + 4, turn + 4.5, 2 * turn, 2 * turn + 4])


def test_a_file_may_be_gone_into(file):
    times = [at for at, _ in in_order(make_arrivals(trace(2), "like('azure', start=1)", data=file))]
    assert times == pytest.approx([0.0, 0.5])
    with pytest.raises(ConfigError, match="has no arrivals from 9 s on"):
        make_arrivals(trace(2), "like('azure', start=9)", data=file)


def test_lengths_may_be_laid_over_too(file):
    came = list(in_order(make_arrivals(trace(3), "like('azure', lengths=True)", data=file)))
    assert [(one.output_tokens, one.known_tokens) for _, one in came] == [(44, 9), (2, 7), (55, 9)]


def test_equal_seeds_draw_equal_arrivals(file):
    def times(seed):
        return [at for at, _ in in_order(make_arrivals(trace(50), "like('gen')", seed, file))]

    assert times(1) == times(1)
    assert times(1) != times(2)


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("bad.csv", AZURE + "soon,1,2\n", r"bad\.csv, line 5: no request that is known: .*soon"),
        ("short.csv", AZURE + "2023-11-16 18:15:46.6805900,1\n", r"short\.csv, line 5: no request that is known"),
        ("bad.jsonl", '{"trace": [[0, 1, 1, "Zipf", 1, 1]], "dataset": {"0": 3}}\n', r"bad\.jsonl, line 1: no request"),
        ("other.jsonl", "[1, 2]\n", r"of no format that has arrivals; there are Azure, BurstGPT, ServeGen"),
    ],
)
def test_file_that_cannot_be_overlaid_is_an_error(tmp_path, name, text, what):
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=what):
        make_arrivals(trace(9), f"like({str(tmp_path / name)!r})")
