"""Loads that are generated, and recorded ones."""

import asyncio
import gzip
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from headwater.errors import ConfigError
from headwater.load.endpoint import Endpoint, base_url
from headwater.load.generator import Limits, Load
from headwater.load.recorded import read_sessions
from headwater.load.scenario import Pace, Scenario
from headwater.load.session import Call, Session, Turn
from tests.load.openai_server import PATIENCE, OpenAiServer, Script, chunk, words_of

FIELDS = {"max_tokens": 3}


def chat(name, *texts, tenant="", replies=None):
    new = [({"role": "user", "content": text},) for text in texts]
    replies = replies or [None] * len(texts)
    return Session(name, tuple(Turn(m, reply=r) for m, r in zip(new, replies, strict=True)), tenant)


def run(server, drive, limits=None, keep_recorded=False, timeout=PATIENCE, on_result=lambda result: None):
    """Results of `drive(load)`."""

    async def main():
        endpoint = Endpoint(server.url, "key", "m", FIELDS, timeout)
        load = Load(endpoint, limits or Limits(), keep_recorded, on_result)
        try:
            return await drive(load)
        finally:
            await endpoint.close()

    return asyncio.run(main())


def at_once(*sessions):
    """List all turns of all sessions as due at 0."""
    return [Call(0.0, session, turn) for session in sessions for turn in range(len(session.turns))]


@pytest.fixture
def server():
    with OpenAiServer() as server:
        yield server


@pytest.mark.parametrize("loop", ["open", "closed"])
def test_the_next_turn_comes_after_the_answer_and_with_it(server, loop):
    sessions = [chat("a", "one", "two", "three"), chat("b", "four", "five")]
    if loop == "open":
        results = run(server, lambda load: load.open_loop(at_once(*sessions)))
    else:
        results = run(server, lambda load: load.closed_loop(sessions, 2))
    assert [r.outcome for r in results] == ["ok"] * 5
    for name, first, n in (("a", "one", 3), ("b", "four", 2)):
        mine = sorted((r for r in results if r.session == name), key=lambda r: r.turn)
        assert [r.turn for r in mine] == list(range(n))
        assert all(earlier.ended <= later.sent for earlier, later in pairwise(mine))
        bodies = [b for b in server.bodies if b["messages"][0]["content"] == first]
        assert [len(b["messages"]) for b in bodies] == [2 * i + 1 for i in range(n)]
        assert bodies[-1]["messages"][1] == {"role": "assistant", "content": "w0 w1 w2 "}
        assert all(later.cached_tokens >= earlier.prompt_tokens - 1 for earlier, later in pairwise(mine))


def test_a_history_may_keep_the_recorded_answers(server):
    session = chat("a", "one", "two", replies=["said then", None])
    run(server, lambda load: load.closed_loop([session], 1), keep_recorded=True)
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "said then"}


def test_request_has_the_fields_of_its_turn(server):
    turns = (Turn(prompt=(1, 2), output_tokens=9, fields={"top_p": 0.5}), Turn(prompt="a b"))
    results = run(server, lambda load: load.closed_loop([Session("s", turns, tenant="t")], 1))
    first, second = server.bodies
    assert (first["prompt"], first["max_tokens"], first["top_p"], first["cache_salt"]) == ([1, 2], 9, 0.5, "t")
    assert (second["prompt"], second["max_tokens"]) == ("a b", 3)
    assert first["stream"] is True
    assert first["stream_options"] == {"include_usage": True}
    assert "Bearer key" in server.heads[0]
    assert [(r.prompt_tokens, r.output_tokens, len(r.gaps)) for r in results] == [(2, 9, 8), (2, 3, 2)]


BUSY = Script(status=503, headers={"retry-after": "1"}, body={"error": {"message": "full up"}})


@pytest.mark.parametrize(
    ("script", "outcome", "detail"),
    [
        (BUSY, "refused", "full up"),
        (Script(status=429, body={"error": {"message": "slower"}}), "refused", "slower"),
        (Script(status=503, body={"error": {"message": "stopped"}}), "error", "stopped"),
        (Script(status=400, body={"detail": "bad"}), "error", "bad"),
        (Script([chunk("a"), {"error": {"message": "midway"}}]), "error", "midway"),
        (Script([{"error": {"message": "no room", "code": "queue_full"}}]), "refused", "no room"),
        (Script([chunk("a"), {"error": {"message": "late", "code": "queue_full"}}]), "error", "late"),
        (Script([chunk("a")]), "error", "ended before"),
        (Script([chunk("a"), chunk("b")], hold_after=1), "timeout", "0.2 s"),
    ],
)
def test_invalid_answer_is_reported_and_ends_its_session(script, outcome, detail):
    patience = 0.2 if outcome == "timeout" else PATIENCE
    with OpenAiServer(lambda server, body: script) as server:
        results = run(server, lambda load: load.open_loop(at_once(chat("a", "one", "two"))), timeout=patience)
    assert [r.outcome for r in results] == [outcome, "skipped"]
    assert detail in results[0].detail
    assert len(server.bodies) == 1


def test_absent_server_is_an_error_and_not_a_crash():
    with OpenAiServer() as server:
        gone = SimpleNamespace(url=server.url)
    (result,) = run(gone, lambda load: load.closed_loop([chat("a", "one")], 1))
    assert (result.outcome, result.status) == ("error", None)


def test_open_loop_sends_independently_of_earlier_requests():
    """All requests are on their way while none is answered: each answer waits until the last request has come."""
    n = 40
    sessions = [chat(str(i), f"say {i}") for i in range(n)]
    came = []

    def answer(server, body):
        came.append(body)
        return Script([chunk("a")], hold_after=0)

    with OpenAiServer(answer) as server:

        async def drive(load):
            sending = asyncio.ensure_future(load.open_loop(at_once(*sessions)))
            async with asyncio.timeout(PATIENCE):
                while len(came) < n:
                    await asyncio.sleep(0.001)
            load.stop()
            return await sending

        results = run(server, drive)
    assert [r.outcome for r in results] == ["interrupted"] * n


def test_wait_for_the_previous_turn_counts_only_as_lateness():
    with OpenAiServer(lambda server, body: server.talk(body, gap=0.01)) as server:
        first, second = run(server, lambda load: load.open_loop(at_once(chat("a", "one", "two"))))
    assert second.sent >= first.ended > second.due
    assert second.ttft_from_due == pytest.approx(second.ttft + second.sent - second.due)


def test_requests_and_duration_bound_a_run(server):
    many = [chat(str(i), "x") for i in range(20)]
    assert len(run(server, lambda load: load.closed_loop(iter(many), 4), Limits(requests=7))) == 7
    calls = [Call(due, session, 0) for due, session in zip((0.0, 0.01, 0.02, 5.0), many, strict=False)]
    assert len(run(server, lambda load: load.open_loop(calls), Limits(duration=0.02))) == 2
    assert len(run(server, lambda load: load.open_loop(calls), Limits(requests=1))) == 1


def test_a_fault_of_the_generator_is_raised_and_not_counted(server):
    def broken(result):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        run(server, lambda load: load.closed_loop([chat("a", "x", "y")] * 3, 2), on_result=broken)


def scenario(server, drive, sessions, limits):
    phases, heard = [], []

    async def main():
        endpoint = Endpoint(server.url, None, "m", FIELDS, PATIENCE)
        made = Scenario(endpoint, sessions, limits, False, lambda *phase: phases.append(phase), heard.append)
        try:
            return await drive(made)
        finally:
            await endpoint.close()

    run_phases = asyncio.run(main())
    assert len(heard) == sum(len(phase.results) for phase in run_phases)
    assert [name for name, _ in phases] == [phase.name for phase in run_phases]
    return run_phases


def test_overload_sends_multiples_of_the_closed_loops_rate(server):
    sessions = (chat(str(i), f"say {i}") for i in range(1000))
    pace = Pace(clients=4, process="constant")
    capacity, one, four = scenario(server, lambda s: s.overload(pace, (1.0, 4.0)), sessions, Limits(requests=12))
    assert [len(phase.results) for phase in (capacity, one, four)] == [12, 12, 12]
    ok = capacity.results
    rate = len(ok) / (max(r.ended for r in ok) - min(r.sent for r in ok))
    for phase, factor in ((one, 1), (four, 4)):
        assert phase.results[-1].due == pytest.approx(12 / (factor * rate))
    sent = [json.dumps(body["messages"]) for body in server.bodies]
    assert len(set(sent)) == 36  # no phase repeats another's


def test_fairness_floods_under_another_salt(server):
    sessions = (chat(str(i), f"say {i}") for i in range(1000))
    alone, beside = scenario(server, lambda s: s.fairness(Pace(rate=200.0), 3.0), sessions, Limits(requests=10))
    assert {r.tenant for r in alone.results} == {"quiet"}
    tenants = [r.tenant for r in beside.results]
    assert len(tenants) == 40
    assert tenants.count("flood") > 2 * tenants.count("quiet") > 0
    quiet = [[r.due for r in phase.results if r.tenant == "quiet"] for phase in (alone, beside)]
    n = min(map(len, quiet))
    assert quiet[0][:n] == quiet[1][:n]  # the same arrivals, so that the two can be compared
    assert {body["cache_salt"] for body in server.bodies} == {"quiet", "flood"}
    assert all(words_of(body) for body in server.bodies)


@pytest.mark.parametrize(("url", "base"), [("http://h:1/", "http://h:1"), ("https://h/v1", "https://h")])
def test_urls_may_end_with_v1(url, base):
    assert base_url(url) == base


@pytest.mark.parametrize("url", ["h:1", "ftp://h", "http://", "http://h:port"])
def test_invalid_url_is_refused(url):
    with pytest.raises(ValueError, match="url is"):
        base_url(url)


SHARED = Path(__file__).parents[3] / "shared" / "data"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def sessions_of(tmp_path, *lines, vocab=None):
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return list(read_sessions(path, vocab))


def test_a_session_has_a_turn_for_each_call(tmp_path):
    messages = [{"role": "system", "content": "s"}, user("a"), assistant("A"), user("b"), user("c"), assistant("C")]
    line = {"session": "x", "messages": messages, "calls": [2, 5], "t0": 100, "t": [0, 7]}
    line["branches"] = [{"at": 3, "messages": [user("z")], "reply": "Z"}]
    session, branch = sessions_of(tmp_path, line)
    assert session.id == "x"
    assert [turn.messages for turn in session.turns] == [tuple(messages[:2]), tuple(messages[3:5])]
    assert [(turn.reply, turn.at) for turn in session.turns] == [("A", 100.0), ("C", 107.0)]
    assert branch.turns[0].messages == (*messages[:3], user("z"))


def test_chat_ending_with_an_answer_has_a_turn_per_answer(tmp_path):
    (session,) = sessions_of(tmp_path, {"messages": [user("a"), assistant("A"), user("b"), assistant("B")]})
    assert [(turn.messages, turn.reply) for turn in session.turns] == [((user("a"),), "A"), ((user("b"),), "B")]


def test_requests_keep_their_fields(tmp_path):
    body = {"model": "gone", "messages": [user("a"), assistant("A"), user("b")], "max_tokens": 7, "top_p": 0.5}
    one, batch = sessions_of(tmp_path, body, {"custom_id": "1", "body": body, "t": 3.5})
    for session in (one, batch):
        (turn,) = session.turns
        assert (len(turn.messages), turn.output_tokens, turn.fields) == (3, 7, {"top_p": 0.5})
    assert (one.turns[0].at, batch.turns[0].at) == (None, 3.5)


def test_prompts_are_text_or_token_ids(tmp_path):
    lines = ({"prompt": "hi", "max_tokens": 3}, [1, 2], {"prompt_token_ids": [3]})
    assert [s.turns[0].prompt for s in sessions_of(tmp_path, *lines)] == ["hi", (1, 2), (3,)]


def test_equal_hashed_blocks_become_equal_tokens(tmp_path):
    lines = [
        {"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [4, 5]},
        {"timestamp": 2500, "input_length": 1024, "output_length": 9, "hash_ids": [4, 6]},
    ]
    a, b = (session.turns[0] for session in sessions_of(tmp_path, *lines, vocab=100))
    assert (len(a.prompt), len(b.prompt), a.at, a.output_tokens) == (700, 1024, 1.5, 9)
    assert a.prompt[:512] == b.prompt[:512]
    assert a.prompt[512:] != b.prompt[512:700]
    assert max(b.prompt) < 100


def test_a_csv_has_lengths_and_times(tmp_path):
    path = tmp_path / "trace.csv.gz"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,30,4", "2023-11-16 18:15:48,5,6"]
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    a, b = (session.turns[0] for session in read_sessions(path, vocab=50))
    assert (len(a.prompt), a.output_tokens, len(b.prompt)) == (30, 4, 5)
    assert b.at - a.at == pytest.approx(1.31941)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{oops", "log.jsonl:1"),
        ("7", "must be an object"),
        ('{"text": 1}', "prompt"),
        ("[]", "empty"),
        ('{"messages": [], "calls": [3, 1]}', "must ascend"),
        ('{"messages": [{}, {}], "calls": [{"at": 1}]}', r"calls are .*must ascend from 1 to at most 1: each is"),
        ('{"messages": [{}, {}], "calls": 1}', "calls are 1, must ascend"),
        ('{"messages": ["hello", {}], "calls": [1]}', "no known form"),
        ('{"hash_ids": [1], "input_length": 3, "output_length": 1}', "--vocab"),
    ],
)
def test_invalid_request_is_named_with_its_line(tmp_path, line, part):
    path = tmp_path / "log.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=part):
        list(read_sessions(path))


@pytest.mark.parametrize(
    ("file", "sessions", "turns"),
    [("mtbench101/sessions.jsonl.zst", 1388, 4208), ("mini_swe_agent/sessions.jsonl.zst", 500, 20163)],
)
def test_recorded_sessions_have_the_requests_that_their_readme_counts(file, sessions, turns):
    pytest.importorskip("zstandard")
    if not (SHARED / file).is_file():
        pytest.skip(f"{file} is not there")
    counts = [len(session.turns) for session in read_sessions(SHARED / file)]
    assert (len(counts), sum(counts)) == (sessions, turns)
