"""Traces are found by name below a data folder, and read up to a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.errors import TraceError
from headwater.traces.read import make_trace, read_trace

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


def test_file_of_unknown_format_is_an_error_with_the_formats(written):
    with pytest.raises(TraceError, match=r"line 1: .\{'a': 1\}. is of no format that is known; there are .*Mooncake"):
        read_trace(written({"a": 1}))


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
