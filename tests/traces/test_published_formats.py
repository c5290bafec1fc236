"""Formats of other projects, by hand: requests, inferred parts, usage, and folders of sessions."""

import json

import pytest

from headwater.errors import TraceError
from headwater.traces.read import READERS, read_trace, traces_of
from headwater.traces.request import Usage
from headwater.traces.tokens import Words
from tests.traces import published
from tests.traces.conftest import tokens
from tests.traces.shared import shared_tokens


def lengths(trace):
    return [(one.session, one.prompt_tokens, one.usage) for one in trace.requests]


def n_words(text):
    return len(Words().of(text))


def test_codex_rounds_have_hidden_tools_usage_and_times(written):
    trace = read_trace(written(*published.CODEX))
    first, second = trace.requests
    assert [one.session for one in trace.requests] == ["c1", "c1"]
    assert [one.usage for one in trace.requests] == [Usage(100, 0, 7), Usage(130, 96, 7)]
    assert first.prompt_tokens == 100
    assert shared_tokens(first, second) == first.prompt_tokens
    assert second.at - first.at == 5.0
    assert trace.reported_hit_rate == pytest.approx(96 / 230)
    assert trace.notes[1].startswith("system prompt and tools are not in the files")


def test_compaction_of_codex_replaces_the_history(written):
    history = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "In short."}]}]
    later = [
        published.item(20, "compacted", message="", replacement_history=history),
        published.codex_text(21, "assistant", "I continue."),
        published.codex_usage(22, 90, 64, 320),
    ]
    *_, second, third = read_trace(written(*published.CODEX, *later)).requests
    assert third.prompt_tokens < second.prompt_tokens
    assert shared_tokens(second, third) == 100 - 3 - (3 + n_words("Fix it.") + 2) + 3


def test_claude_codes_parts_are_one_answer_with_its_usage(written):
    trace = read_trace(written(*published.CLAUDE_CODE))
    assert [(session, usage) for session, _, usage in lengths(trace)] == [
        ("s1", Usage(100, 0, 9)),
        ("s1", Usage(100, 64, 9)),
    ]
    first, second = trace.requests
    assert shared_tokens(first, second) == first.prompt_tokens
    assert second.prompt_tokens > first.known_tokens


def test_claude_codes_rewind_summary_and_sub_agent_leave_the_history(written):
    rewound = published.claude("user", "u3", "a2", "Rather this.", 20)
    answer = published.claude_answer("a4", "u3", "m3", {"type": "text", "text": "Yes."}, 0)
    summary = published.claude("user", "u4", None, "In short.", 30, isCompactSummary=True)
    after = published.claude_answer("a5", "u4", "m4", {"type": "text", "text": "On."}, 0)
    agent = {"isSidechain": True, "agentId": "x"}
    helped = published.claude("user", "u5", None, "Look.", 40, **agent)
    found = published.claude_answer("a6", "u5", "m5", {"type": "text", "text": "Seen."}, 0, **agent)
    trace = read_trace(written(*published.CLAUDE_CODE, rewound, answer, summary, after, helped, found))
    first, second, third, fourth, fifth = trace.requests
    assert shared_tokens(second, third) == first.known_tokens + 1 + 3  # the user's header is common, too
    assert fourth.prompt_tokens < first.prompt_tokens + 5
    assert [one.session for one in (fourth, fifth)] == ["s1", "s1/x"]


def test_folder_of_sessions_is_one_trace_and_other_files_are_left_out(tmp_path):
    for name, first in (("a", "c1"), ("b", "c2")):
        lines = [
            {**published.CODEX[0], "payload": {**published.CODEX[0]["payload"], "id": first}},
            *published.CODEX[1:],
        ]
        (tmp_path / "2026").mkdir(exist_ok=True)
        (tmp_path / "2026" / f"rollout-{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "history.jsonl").write_text('{"ts": 1, "nothing": "known"}\n')
    trace = read_trace(tmp_path)
    assert [one.session for one in trace.requests] == ["c1", "c1", "c2", "c2"]
    assert shared_tokens(trace.requests[0], trace.requests[2]) == trace.requests[0].prompt_tokens
    assert len(read_trace(tmp_path, limit=1).requests) == 2
    assert [(name, kind) for name, kind, _ in traces_of(tmp_path)] == [("2026", "Codex")]


def test_tracelabs_rounds_share_prefixes_that_lengths_imply(written):
    later = {**published.ROUND, "round_index": 1, "input_tokens_total": 960, "prefix_tokens": 600}
    shorter = {**published.ROUND, "round_index": 2, "input_tokens_total": 320, "prefix_tokens": 128}
    trace = read_trace(written(published.ROUND, later, shorter))
    assert trace.block_tokens == 64
    assert [one.known_tokens for one in trace.requests] == [704, 1024, 384]
    texts = [one.text for one in trace.requests]
    assert texts[1][: 11 * 8] == texts[0][: 11 * 8]
    assert texts[2][: 2 * 8] == texts[1][: 2 * 8]
    assert texts[2][2 * 8 : 3 * 8] != texts[1][2 * 8 : 3 * 8]
    assert trace.reported_hit_rate == pytest.approx(728 / 1920)
    assert trace.notes[-1].startswith("1 rounds are shorter")


def test_swe_agents_queries_are_its_prompts(written):
    second = {**published.STEP, "query": [*published.STEP["query"], {"role": "user", "content": "Old: 3 lines"}]}
    trace = read_trace(written({**published.SWE_AGENT, "trajectory": [published.STEP, second]}))
    first, second = trace.requests
    assert first.output_tokens == n_words("Look.\nls") + 1
    assert shared_tokens(first, second) == first.prompt_tokens - 2


@pytest.mark.parametrize("layout", [None, 1])
def test_mini_swe_agents_messages_are_read_with_its_usage(written, layout):
    trace = read_trace(written(json.dumps(published.MINI_SWE_AGENT, indent=layout)))
    assert [one.usage for one in trace.requests] == [Usage(40, None, 4)]
    assert trace.reported_hit_rate is None


def test_open_hands_events_of_both_versions_are_rounds(written):
    old = read_trace(written(*published.OPEN_HANDS))
    assert [one.usage for one in old.requests] == [Usage(50, 32, 5), None]
    (as_array,) = (read_trace(written(json.dumps(published.OPEN_HANDS))),)
    run = {"instance_id": "i", "history": published.OPEN_HANDS}
    (of_output,) = (read_trace(written(run)),)
    for other in (as_array, of_output):
        assert [one.text for one in other.requests] == [one.text for one in old.requests]
    assert {one.session for one in of_output.requests} == {"i"}
    new = read_trace(written(*published.OPEN_HANDS_1))
    assert len(new.requests) == 2
    assert shared_tokens(*new.requests) == new.requests[0].prompt_tokens


def test_aiperfs_turns_contain_answers_of_their_lengths(written):
    trace = read_trace(written(published.AIPERF, {"text": "Alone."}))
    first, second, single = trace.requests
    assert first.output_tokens == 5 * n_words(" answer") + 1
    assert second.think == 1.5
    assert shared_tokens(first, second) == first.prompt_tokens
    assert single.session == "line 2"
    inputs = {"data": [{"session_id": "a", "payloads": [{"messages": [published.USER]}]}]}
    assert len(read_trace(written(json.dumps(inputs, indent=2))).requests) == 1


def test_batches_of_the_responses_api_are_read(written):
    asked = {"model": "m", "instructions": "Be kind.", "input": "Why?"}
    items = {"input": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"text": "Why?"}]}]}
    lines = [{**published.BATCH, "body": body} for body in (asked, items)]
    first, second = read_trace(written(*lines)).requests
    assert first.text == second.text
    with pytest.raises(TraceError, match="is of no format that is known: it has 'id', 'custom_id', 'response'"):
        read_trace(written({"id": "b", "custom_id": "1", "response": {"body": published.ANSWER}}))


@pytest.mark.parametrize("log", [published.LITE_LLM, published.SPANS], ids=["LiteLLM", "spans"])
def test_logs_with_usage_have_sessions_times_and_cached_tokens(written, log):
    trace = read_trace(written(log))
    (request,) = trace.requests
    assert (request.usage.prompt_tokens, request.usage.cached_tokens) == (30, 16)
    assert request.session in ("t", "s")
    assert request.at in (1700.5, 1700000000.5)
    assert request.output_tokens == n_words("So it is.") + 1


def test_spans_without_messages_are_counted_and_numbered_names_are_read(written):
    old = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "Why?", "gen_ai.completion.0.role": "assistant"}
    span = {"name": "chat", "attributes": {**old, "gen_ai.completion.0.content": "So it is."}}
    trace = read_trace(written(span, published.SPANS))
    assert trace.requests[0].text == trace.requests[1].text
    assert trace.notes == ("1 spans without messages are left out",)


def test_vllms_log_lines_are_requests_with_ids_texts_and_outputs(written):
    trace = read_trace(written(*published.VLLM))
    first, second = trace.requests
    assert first.text == tokens(5, 6, 7, 8, 9)
    assert (first.prompt_tokens, first.output_tokens) == (3, 2)
    assert second.prompt_tokens == n_words("Why not?")
    assert second.at - first.at == 2.0
    assert trace.notes == ("1 requests without prompt or token ids are left out",)


def test_texts_of_input_and_output_are_requests(written):
    lines = [{"timestamp": n, "input": "one" + " two" * n, "output": "x", "session_id": 0} for n in (0, 1)]
    first, second = read_trace(written(*lines)).requests
    assert (first.session, second.session) == ("0", "0")
    assert shared_tokens(first, second) == 1


def test_formats_are_listed_within_80_columns():
    width = max(map(len, READERS))
    for name, reader in READERS.items():
        assert reader.about
        assert len(f"{name:{width}}  {reader.about}") <= 80
        assert len(f"{reader.__doc__}") > 60


def test_parquet_without_its_library_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "chats.parquet").write_bytes(b"PAR1....PAR1")
    with pytest.raises(TraceError, match=r"pip install 'headwater\[parquet\]'"):
        read_trace(tmp_path / "chats.parquet")


def test_rows_of_parquet_are_those_of_lines_and_broken_files_are_refused(written, tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    turns = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]
    chats = [{"conversation_id": f"c{n}", "model": "m", "conversation": turns * n} for n in (1, 2)]
    path = tmp_path / "chats.parquet"
    parquet.write_table(arrow.Table.from_pylist(chats), path)
    assert [(r.session, r.text, r.output_tokens) for r in read_trace(path).requests] == [
        (r.session, r.text, r.output_tokens) for r in read_trace(written(*chats)).requests
    ]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(TraceError, match=r"chats.parquet.* not a whole file of Parquet"):
        read_trace(path)
