"""Files of --record: the traffic's lengths, times and hashes, and nothing else."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from headwater.config import ServeConfig
from headwater.errors import ConfigError
from headwater.events import FailedEvent, FinishedEvent, PromptEvent, TokenEvent
from headwater.request import Boundaries, Generation, SamplingParams
from headwater.server.app import create_app
from headwater.server.observe import recording
from headwater.server.observe.recording import RecordedEngine, RecordedRequest, Recorder
from headwater.server.routes import observe
from headwater.traces.read import read_trace
from headwater.traces.recordings import PageHashes, Served

SHARED = "Zanzibar and its cloves, " * 8  # 200 tokens of a byte each: three pages


def record(engine, path, *bodies):
    """Return the trace of completions that an app answered and recorded."""
    with TestClient(create_app(engine, ServeConfig(record=path))) as client:
        for body in bodies:
            assert client.post("/v1/completions", json={"max_tokens": 8, **body}).status_code == 200
    return read_trace(path)


def pages(request):
    return [request.text[at : at + 8] for at in range(0, len(request.text), 8)]


@pytest.mark.parametrize("name", ["my.trace", "my.trace.zst"])
def test_recording_replays(engine, tmp_path, name):
    trace = record(engine, tmp_path / name, {"prompt": SHARED + "A"}, {"prompt": SHARED + "B" * 80})
    assert trace.block_tokens == 64
    first, second = trace.requests
    assert (first.prompt_tokens, first.output_tokens, first.known_tokens) == (201, 8, 209)
    assert (second.prompt_tokens, second.output_tokens, second.known_tokens) == (280, 8, 288)
    assert 0 <= second.at - first.at < 60
    assert first.session != second.session


def test_page_hashes_are_equal_for_equal_prefixes_only(engine, tmp_path):
    trace = record(engine, tmp_path / "my.trace", {"prompt": "A" + SHARED}, {"prompt": SHARED}, {"prompt": SHARED})
    other, first, second = map(pages, trace.requests)
    assert first == second
    assert len(first) == 3
    assert not set(first) & set(other)  # although the text continues alike


def test_answer_pages_are_recorded_for_reuse_by_the_next_turn(engine, tmp_path):
    trace = record(engine, tmp_path / "my.trace", {"prompt": "x" * 60}, {"prompt": "x" * 60 + engine.script[:8]})
    first, second = trace.requests
    assert first.known_tokens == 68
    assert pages(first) == pages(second)[:1]


def test_another_recording_has_other_hashes(engine, tmp_path):
    first = record(engine, tmp_path / "first.trace", {"prompt": SHARED}).requests[0]
    second = record(engine, tmp_path / "second.trace", {"prompt": SHARED}).requests[0]
    assert len(first.text) == len(second.text)
    assert not set(pages(first)) & set(pages(second))


def test_namespaces_share_no_hash_and_their_names_stay_secret(engine, tmp_path):
    bodies = [{"prompt": SHARED}, *({"prompt": SHARED, "cache_salt": salt} for salt in ("secretive", "secretive", "b"))]
    trace = record(engine, tmp_path / "my.trace", *bodies)
    unnamed, first, second, other = trace.requests
    assert unnamed.namespace == ""
    assert first.namespace == second.namespace != other.namespace
    assert pages(first) == pages(second)
    assert not set(pages(first)) & (set(pages(other)) | set(pages(unnamed)))
    assert b"secretive" not in (tmp_path / "my.trace").read_bytes()


def test_no_text_and_no_token_is_in_the_file(engine, tmp_path):
    record(engine, tmp_path / "my.trace", {"prompt": SHARED, "user": "jane"})
    text = (tmp_path / "my.trace").read_text()
    head, line = map(json.loads, text.splitlines())
    assert {"headwater_recording", "page_size", "model", "config", "weights", "placement", "eviction"} <= set(head)
    assert head["weights"] == "auto"
    assert set(line) == {"t", "in", "out", "known", "pages"}
    assert len(line["pages"]) == 3 * 16
    tokens = engine.tokenizer.encode(SHARED).ids[:64]
    for secret in (
        "anzi",
        engine.script[:5],
        "jane",
        str(tokens)[1:-1],
        bytes(tokens).hex(),
        SHARED[:8].encode().hex(),
    ):
        assert secret not in text


def test_segments_are_recorded_only_as_hashes(engine, tmp_path):
    first, second = "First document. " * 5, "Second document. " * 4
    bodies = [
        {"prompt": f"Lead.<|segment|>{a}<|segment|>{b}<|segment|>Why?"} for a, b in ((first, second), (second, first))
    ]
    trace = record(
        engine, tmp_path / "my.trace", *bodies, {**bodies[0], "exact": True}, {**bodies[0], "cache_salt": "b"}
    )
    here, _, exact, _ = trace.requests
    assert [span.end - span.start for span in here.segments] == [len(first), len(second)]
    ids = [[trace.ids(request, span) for span in request.segments] for request in trace.requests]
    assert ids[0] == ids[1][::-1]
    assert not set(ids[0]) & set(ids[3])
    assert exact.segments == ()
    assert here.fidelity == engine.seen[0].fidelity
    assert "document" not in (tmp_path / "my.trace").read_text()


def test_boundaries_of_a_chat_are_kept(engine, tmp_path):
    path = tmp_path / "my.trace"
    messages = [{"role": "system", "content": "s" * 100}, {"role": "user", "content": "u" * 100}]
    with TestClient(create_app(engine, ServeConfig(record=path))) as client:
        assert client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4}).status_code == 200
    (request,) = read_trace(path).requests
    assert request.boundaries == engine.seen[0].boundaries
    assert request.boundaries.system_end > 100


def test_file_of_an_earlier_run_is_not_touched(engine, tmp_path):
    path = tmp_path / "my.trace.zst"
    record(engine, path, {"prompt": SHARED})
    before = path.read_bytes()
    record(engine, path, {"prompt": SHARED}, {"prompt": SHARED})
    assert path.read_bytes() == before
    assert len(read_trace(tmp_path / "my-2.trace.zst").requests) == 2


def test_missing_record_folder_is_refused_by_the_configuration(tmp_path):
    with pytest.raises(ConfigError, match=r"record is .*nowhere.*must be in a folder that exists"):
        ServeConfig(record=tmp_path / "nowhere" / "my.trace")


def test_without_the_setting_nothing_is_recorded(engine, monkeypatch):
    monkeypatch.setattr(observe, "Recorder", None)  # which cannot be called
    create_app(engine, ServeConfig())
    with pytest.raises(TypeError):
        create_app(engine, ServeConfig(record=Path("my.trace")))


class Scripted:
    """Engine whose events a test sends itself."""

    def __init__(self):
        self.cancelled = []

    def submit(self, generation, on_event):
        self.on_event = on_event
        return 7

    def cancel(self, request_id):
        self.cancelled.append(request_id)


class Told:
    def __init__(self):
        self.heard = []

    def add(self, heard):
        self.heard.append(heard)


@pytest.fixture
def recorded():
    told = Told()
    return RecordedEngine(Scripted(), told), told.heard


def generation(**changes):
    return Generation(tuple(range(100)), SamplingParams(), boundaries=Boundaries(5), **changes)


@pytest.mark.parametrize(("keep_output", "known"), [(True, 102), (False, 100)])
def test_answer_that_the_template_strips_is_counted_and_not_known(recorded, keep_output, known):
    engine, heard = recorded
    events = []
    engine.submit(generation(keep_output=keep_output), events.append)
    sent = [TokenEvent(1, ""), TokenEvent(2, ""), FinishedEvent("stop", "", None, 2)]
    for event in sent:
        engine.on_event(event)
    assert events == sent
    request = heard[0].request(PageHashes(b"key", 64))
    assert (request.prompt_tokens, request.output_tokens, request.known_tokens) == (100, 2, known)


def test_prompt_that_is_scored_is_recorded_when_its_answer_ends(recorded):
    engine, heard = recorded
    engine.submit(generation(), lambda event: None)
    for event in (PromptEvent(()), TokenEvent(1, ""), FinishedEvent("length", "", None, 1)):
        assert heard == []
        engine.on_event(event)
    assert [(one.kept, one.output) for one in heard] == [(True, [1])]


def test_cancelled_request_is_recorded_once_with_output_not_kept(recorded):
    engine, heard = recorded
    number = engine.submit(generation(), lambda event: None)
    engine.on_event(TokenEvent(1, ""))
    engine.cancel(number)
    engine.on_event(FinishedEvent("stop", "", None, 1))
    engine.cancel(number)
    assert engine.cancelled == [number, number]
    assert [(one.kept, one.output) for one in heard] == [(False, [1])]


def test_request_that_never_ran_is_not_recorded(recorded):
    engine, heard = recorded
    engine.submit(generation(), lambda event: None)
    engine.on_event(FailedEvent(RuntimeError()))
    engine.cancel(engine.submit(generation(), lambda event: None))
    assert heard == []
    assert engine._open == {}


def test_recorded_file_is_readable_by_its_owner_only(tmp_path):
    path = Recorder(tmp_path / "my.trace", Served(64, "fake")).path
    assert path.stat().st_mode & 0o777 == 0o600


def test_names_with_lone_surrogates_have_distinct_hashes():
    hashes = PageHashes(b"key", 1)
    assert hashes.of("\ud800", [1]) != hashes.of("\ud801", [1])
    assert hashes.name("\ud800") != hashes.name("\ud801")


def test_requests_beyond_the_recorders_queue_are_dropped_and_counted(tmp_path):
    recorder = Recorder(tmp_path / "my.trace", Served(64, "fake"))
    for _ in range(recording.MAX_QUEUED_REQUESTS + 3):
        recorder.add(RecordedRequest(generation(), 0.0))
    assert recorder.dropped == 3


def test_full_disk_ends_the_recording_and_nothing_else(tmp_path, monkeypatch):
    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def write(self, lines):
            raise OSError("no space left on device")

    monkeypatch.setattr(recording, "_new_file", lambda path: (path, Full()))
    recorder = Recorder(tmp_path / "my.trace", Served(64, "fake"))

    async def recording_one():
        async with recorder.running():
            recorder.add(RecordedRequest(generation(), 0.0))

    asyncio.run(recording_one())
    assert recorder.dropped == 1


KILLED = """
    import sys, time
    from pathlib import Path
    from headwater.errors import TraceError
    from headwater.server.observe.recording import RecordedRequest, Recorder
    from headwater.traces.read import read_trace
    from headwater.traces.recordings import Served
    from headwater.request import Generation, SamplingParams
    path = Path(sys.argv[1])
    recorder = Recorder(path, Served(64, "fake"))
    recorder._thread.start()
    for number in range(20):
        recorder.add(RecordedRequest(Generation(tuple(range(640)), SamplingParams()), float(number)))
    def written():
        try:
            return len(read_trace(path).requests)
        except TraceError:  # as long as there is none
            return 0
    patience = time.monotonic() + 20
    while written() < 20 and time.monotonic() < patience:
        time.sleep(0.001)
    print("written", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["my.trace", "my.trace.zst"])
def test_killed_servers_recording_can_be_read(tmp_path, name):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / name)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"written\n"
        os.kill(process.pid, signal.SIGKILL)
    trace = read_trace(tmp_path / name)
    assert [request.at for request in trace.requests] == [float(number) for number in range(20)]


def test_line_that_was_torn_is_left_out_with_a_note(tmp_path, engine):
    path = tmp_path / "my.trace"
    record(engine, path, {"prompt": SHARED}, {"prompt": SHARED})
    path.write_bytes(path.read_bytes()[:-5])
    trace = read_trace(path)
    assert len(trace.requests) == 1
    assert "the last line was not complete" in trace.notes[-1]
