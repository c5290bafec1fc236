"""Each format's requests, by hand."""

import pytest

from headwater.errors import ConfigError, TraceError
from headwater.request import Boundaries
from headwater.traces import documents
from headwater.traces.read import READERS, read_trace
from headwater.traces.tokens import Words
from tests.server.fake_engine import byte_tokenizer
from tests.traces import published
from tests.traces.conftest import blocks, tokens

SYSTEM = {"role": "system", "content": "Be kind."}
USER, REPLY = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So it is."}
AGENT = {
    "session": "one",
    "t0": 1000,
    "t": [0, 5],
    "usage": [[20, 3, 0, 0], [40, 3, 0, 0]],
    "messages": [SYSTEM, USER, REPLY, USER, REPLY, USER],
    "calls": [2, 4],
}
MOONCAKE = {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [4, 9, 5]}
BAILIAN = {"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40, "output_length": 30, "turn": 1}
BAILIAN |= {"type": "text", "hash_ids": [4, 9, 5]}
CLAUDE = {"id": "s", "block_size": 64, "hash_id_scope": "global", "tool_tokens": 40, "system_tokens": 30}
SHAREGPT = {"id": "x", "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So it is."}]}
STORY = {"id": "d", "text": "Once upon.", "questions": [{"question": "Who?", "answers": ["He.", "She."]}]}
PASSAGES = {"id": "q", "question": "Who?", "answers": ["He."], "passages": [{"title": "A", "text": "Once upon."}]}
CHAPTER = {"id": "author_book/one", "chapter": "One", "text": "It was a day.", "questions": []}
VERSION = {"family": "f", "version": 1, "text": "You are kind."}
RECORDING = {"headwater_recording": 1, "page_size": 64, "model": "m"}
FIRST = {
    "headwater recordings": [RECORDING, {"t": 1, "in": 3, "out": 1, "known": 3, "pages": ""}],
    "Mooncake": [MOONCAKE],
    "Qwen-Bailian": [BAILIAN],
    "Azure": ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44"],
    "BurstGPT": ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", "5,GPT-4,70,8,78,API log"],
    "Claude Code in blocks": [{**CLAUDE, "requests": [{"t": 0, "type": "s", "in": 70, "out": 3, "hash_ids": [1]}]}],
    "sessions with messages": [AGENT],
    "ShareGPT": [SHAREGPT],
    "request logs": [{"messages": [USER]}],
    "token lists": [[1, 2, 3]],
    **published.FIRST,
    "documents with questions": [STORY],
    "questions with passages": [PASSAGES],
    "books": [CHAPTER],
    "versions of prompts": [VERSION],
}


def words(*texts):
    one = Words()
    return [len(one.of(text)) for text in texts]


def turn(*ids, n_in=None, out=64, kind="s", **more):
    length = 64 * len(ids) if n_in is None else n_in
    return {"t": 0, "type": kind, "in": length, "out": out, "hash_ids": list(ids), **more}


def known(trace):
    return [(one.prompt_tokens, one.output_tokens, one.known_tokens) for one in trace.requests]


# -- every format --------------------------------------------------------------


def test_every_reader_has_a_sample_here():
    assert set(FIRST) == set(READERS)


@pytest.mark.parametrize("name", READERS)
def test_format_is_detected_by_the_first_reader_of_its_record(written, name):
    first = FIRST[name][0]
    first = first.encode() if isinstance(first, str) else first
    assert next(one for one, reader in READERS.items() if reader.matches(first)) == name
    trace = read_trace(written(*FIRST[name]))
    assert trace.requests
    for request in trace.requests:
        assert request.known_tokens >= request.prompt_tokens > 0
        assert len(request.text) >= request.known_tokens // trace.block_tokens * trace.element_bytes


@pytest.mark.parametrize("name", [name for name in READERS if name != "vLLM logs"])  # whose lines are of many kinds
@pytest.mark.parametrize("odd", [{}, [], 7, None, '"text"', {"messages": 3}, {"input": "x"}, {"hash_ids": {}}])
def test_record_of_another_kind_is_an_error_with_its_line(written, name, odd):
    path = written(*FIRST[name], odd)
    with pytest.raises(TraceError, match=rf"some\.jsonl, line {len(FIRST[name]) + 1}: no request that is known: \S"):
        read_trace(path)


# -- sessions ------------------------------------------------------------------


def test_an_agents_calls_share_one_text_and_have_their_times(written):
    trace = read_trace(written(AGENT))
    first, second = trace.requests
    n_system, n_why, n_so = words("Be kind.", "Why?", "So it is.")
    prompt = (3 + n_system + 2) + (3 + n_why + 2) + 3
    assert (first.prompt_tokens, first.output_tokens, first.known_tokens) == (prompt, n_so + 1, prompt + n_so + 1)
    assert second.prompt_tokens == first.known_tokens + 1 + (3 + n_why + 2) + 3
    assert first.text is second.text
    assert [one.at for one in trace.requests] == [1000.0, 1005.0]
    assert {one.session for one in trace.requests} == {"one"}
    total = first.prompt_tokens + second.prompt_tokens
    assert trace.notes == (f"{total:,} prompt tokens, {total / 60:.3f} of the 60 that were logged",)


def test_a_branch_is_a_session_of_its_own_that_shares_the_beginning(written):
    fork = {"at": 2, "messages": [USER], "reply": "No."}
    trace = read_trace(written({**AGENT, "branches": [fork]}))
    first, _, branch = trace.requests
    assert branch.session == "one/0"
    shared = (first.prompt_tokens - 3) * 4
    assert branch.text[:shared] == first.text[:shared]
    assert branch.known_tokens - branch.prompt_tokens == words("No.")[0] + 1


def test_a_chat_without_calls_is_a_request_for_each_answer(written):
    trace = read_trace(written({"messages": [USER, REPLY, USER, REPLY]}, {"messages": [REPLY, USER, REPLY]}))
    assert [one.session for one in trace.requests] == ["1", "1", "2"]


@pytest.mark.parametrize("calls", [[4, 2], [2, 2], [0], [6]])
def test_invalid_calls_are_errors(written, calls):
    with pytest.raises(TraceError, match=r"line 2: .*calls are \[.*must ascend from 1 to at most 5"):
        read_trace(written(AGENT, {**AGENT, "calls": calls, "t": None}))


def test_times_must_be_as_many_as_calls(written):
    with pytest.raises(TraceError, match="t has 1 times, calls has 2"):
        read_trace(written({**AGENT, "t": [0]}))


# -- blocks --------------------------------------------------------------------


def test_mooncakes_full_blocks_count_and_its_outputs_are_unknown(written):
    trace = read_trace(written(MOONCAKE, {**MOONCAKE, "timestamp": 2500, "input_length": 1024, "hash_ids": [4, 9]}))
    assert trace.block_tokens == 512
    assert [one.text for one in trace.requests] == [blocks(4, 9)] * 2
    assert known(trace) == [(1100, 7, 1100), (1024, 7, 1024)]
    assert [one.at for one in trace.requests] == [1.5, 2.5]
    assert len({one.session for one in trace.requests}) == 2
    assert "no sessions" in trace.notes[0]


@pytest.mark.parametrize(("ids", "tokens"), [([4], 512), ([4, 9, 5, 6], 512), ([1, 2, 3], 100)])
def test_ids_that_do_not_fit_the_block_size_are_refused(written, ids, tokens):
    blocks = -(-1100 // tokens)
    message = rf"line 1: .*hash_ids has {len(ids)} blocks, input_length is 1,100: {blocks} of {tokens} tokens; --block-"
    with pytest.raises(TraceError, match=message):
        read_trace(written({**MOONCAKE, "hash_ids": ids}), block_tokens=None if tokens == 512 else tokens)


def test_block_tokens_reads_ids_of_that_many_tokens(written):
    trace = read_trace(written({**MOONCAKE, "input_length": 600, "hash_ids": list(range(10))}), block_tokens=64)
    assert trace.block_tokens == 64
    assert trace.requests[0].text == blocks(*range(9))
    with pytest.raises(ConfigError, match="--block-tokens 64: this trace is not in hashed blocks"):
        read_trace(written([1, 2]), block_tokens=64)


def test_aiperfs_mooncake_sessions_have_delays_and_may_have_no_ids(written):
    later = {"session_id": "a", "delay": 1500, "input_length": 600, "output_length": 5}
    trace = read_trace(written(MOONCAKE, later, later))
    assert [(one.session, one.think) for one in trace.requests] == [("0", None), ("a", 1.5), ("a", 1.5)]
    texts = [one.text for one in trace.requests]
    assert len({*texts}) == 3
    assert len(texts[1]) == 8
    assert trace.notes[-1] == "2 prompts without hash_ids share no text with others"


def test_bailians_turns_share_blocks_and_their_answers_are_known(written):
    second = {**BAILIAN, "chat_id": 8, "parent_chat_id": 7, "timestamp": 70, "turn": 2}
    second |= {"input_length": 80, "hash_ids": [4, 9, 6, 7, 8]}
    trace = read_trace(written(BAILIAN, {**BAILIAN, "chat_id": 9}, second))
    assert trace.block_tokens == 16
    assert [(one.session, one.at) for one in trace.requests] == [("7", 61.5), ("9", 61.5), ("7", 70.0)]
    assert known(trace) == [(40, 30, 70), (40, 30, 40), (80, 30, 80)]
    assert trace.requests[0].text == blocks(4, 9, 6, 7, 8)
    assert trace.requests[1].text == blocks(4, 9)


def test_rows_of_lengths_share_text_only_within_a_session_that_grows(written):
    rows = "0,a,1,GPT-4,128,64,192,Conversation log", "9,a,1,GPT-4,256,64,320,Conversation log"
    shorter = "20,a,1,GPT-4,100,64,164,Conversation log"
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    trace = read_trace(written(head, *rows, shorter, "30,,1,ChatGPT,256,0,256,API log"))
    assert [one.session for one in trace.requests] == ["a", "a", "a", "line 4"]
    texts = [one.text for one in trace.requests]
    assert texts[0] is texts[1]
    assert len(texts[1]) == 8 * 5
    assert len({texts[1][:8], texts[2][:8], texts[3][:8]}) == 3


def test_recording_shorter_than_its_prompt_is_an_error(written):
    line = {"t": 0, "in": 100, "out": 1, "known": 10, "pages": ""}
    with pytest.raises(TraceError, match=r"line 2: .*in is 100, must be from 1 to known, which is 10"):
        read_trace(written(RECORDING, line))


@pytest.mark.parametrize("parts", [{"system_end": "x"}, {"query_start": -1}, {"extra": [5, "x"]}])
def test_boundary_outside_the_prompt_is_an_error(written, parts):
    line = {"t": 0, "in": 3, "out": 1, "known": 3, "pages": "", **parts}
    with pytest.raises(TraceError, match=rf"line 2: .*{next(iter(parts))} is .*must be a whole number"):
        read_trace(written(RECORDING, line))


def test_prompt_without_tokens_is_an_error(written):
    with pytest.raises(TraceError, match=r"line 2: .*the prompt has 0 tokens, at least 1 is needed"):
        read_trace(written(MOONCAKE, {**MOONCAKE, "input_length": 0, "hash_ids": []}))


@pytest.mark.parametrize("length", [-1, "7", 1.5, None, True])
def test_invalid_length_is_an_error(written, length):
    with pytest.raises(TraceError, match=r"input_length is .* must be a whole number of 0 or more"):
        read_trace(written({**MOONCAKE, "input_length": length}))


def claude(written, *requests, **more):
    return read_trace(written({**CLAUDE, **more, "requests": list(requests)}))


def test_answer_is_read_from_the_next_request_that_continues_it(written):
    requests = turn(1, 2, n_in=150, out=100), turn(1, 2, 3, 4, out=50), turn(1, 2, 7, 8), turn(1, 2, 7)
    trace = claude(written, *requests)
    assert known(trace) == [
        (150, 100, 250),  # the next has all of it
        (256, 50, 256),  # the next goes another way
        (256, 64, 256),  # the next is shorter
        (192, 64, 192),  # there is none
    ]
    texts = [one.text for one in trace.requests]
    assert texts[0] is texts[1]
    assert texts == [blocks(1, 2, 3, 4), blocks(1, 2, 3, 4), blocks(1, 2, 7, 8), blocks(1, 2, 7)]


def test_no_more_is_known_than_the_next_requests_full_blocks(written):
    trace = claude(written, turn(1, 2, out=500), turn(1, 2, 3, n_in=200))
    assert known(trace)[0] == (128, 500, 192)


def test_numbers_with_a_common_beginning_share_no_block(written):
    trace = claude(written, turn(1, 23), turn(1, 2), turn(1, 2345), turn(1, 234), turn(12))
    texts = [blocks(1, 23), blocks(1, 2), blocks(1, 2345), blocks(1, 234), blocks(12)]
    assert [one.text for one in trace.requests] == texts


def test_the_second_copy_of_a_turn_is_dropped(written):
    requests = turn(1), turn(1, kind="n"), turn(1), turn(1), turn(1, 2, kind="n")
    trace = claude(written, *requests)
    assert len(trace.requests) == 4
    assert "1 second copies of a turn were dropped" in trace.notes


def test_sub_agent_is_a_separate_session_with_its_parents_ids(written):
    agent = {"type": "subagent", "t": 3, "agent_id": "a1", "requests": [turn(1, 9)], "tool_tokens": 7}
    trace = claude(written, turn(1, 2), agent, turn(1, 2, 3))
    assert [one.session for one in trace.requests] == ["s", "s", "s/a1"]
    assert trace.requests[2].text == blocks(1, 9)
    assert [one.boundaries for one in trace.requests] == [Boundaries(70), Boundaries(70), Boundaries(7)]


def test_local_ids_are_others_in_each_session_and_global_ids_are_not(written):
    sessions = [{**CLAUDE, "id": name, "requests": [turn(1, 2)]} for name in "ab"]
    shared = read_trace(written(*sessions)).requests
    own = read_trace(written(*({**one, "hash_id_scope": "local"} for one in sessions))).requests
    assert shared[0].text == shared[1].text
    assert own[0].text[:8] != own[1].text[:8]
    assert own[0].text[:8] != shared[0].text[:8]


def test_times_between_requests_are_kept_and_starts_are_not_known(written):
    trace = claude(written, turn(1, think_time=0.0), turn(1, 2, think_time=4.5), turn(1, 2, 3))
    assert [one.think for one in trace.requests] == [0.0, 4.5, None]
    assert {one.at for one in trace.requests} == {None}


# -- tokens and logs -----------------------------------------------------------


def test_token_lists_share_a_text_while_a_session_continues(written):
    lines = [
        {"t": 1.0, "session": 7, "input": [1, 2], "output": [3]},
        {"t": 1.5, "session": 8, "input": [1, 2], "output": [9]},
        {"t": 2.0, "session": 7, "input": [1, 2, 3, 4], "output": [5, 6]},
        {"t": 3.0, "session": 7, "input": [1, 2, 4]},
    ]
    trace = read_trace(written(*lines))
    assert known(trace) == [(2, 1, 3), (2, 1, 3), (4, 2, 6), (3, 0, 3)]
    texts = [one.text for one in trace.requests]
    assert texts[0] is texts[2]
    assert texts == [tokens(1, 2, 3, 4, 5, 6), tokens(1, 2, 9), tokens(1, 2, 3, 4, 5, 6), tokens(1, 2, 4)]
    assert [one.session for one in trace.requests] == ["7", "8", "7", "7"]
    assert [one.at for one in trace.requests] == [1.0, 1.5, 2.0, 3.0]


@pytest.mark.parametrize("line", [[5, 6], {"prompt_token_ids": [5, 6]}, {"prompt": [5, 6]}, {"input_tokens": [5, 6]}])
def test_a_prompt_of_token_ids_may_have_other_names(written, line):
    assert read_trace(written(line)).requests[0].text == tokens(5, 6)


@pytest.mark.parametrize(
    "line",
    [
        [],
        {"input": []},
        {"input": [1.5]},
        {"input": [2**40]},
        {"t": "soon", "input": [1]},
        {"t": float("nan"), "input": [1]},
    ],
)
def test_invalid_tokens_are_an_error(written, line):
    with pytest.raises(TraceError, match="line 2: no request that is known"):
        read_trace(written([1], line))


def answer(text, tokens=3):
    return {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": {"completion_tokens": tokens}}


@pytest.mark.parametrize(
    "log", ["So it is.", REPLY, answer("So it is."), {"status_code": 200, "body": answer("So it is.")}]
)
@pytest.mark.parametrize("place", [None, "body", "request"])
def test_a_logged_request_is_known_with_its_answer_wherever_they_are(written, tmp_path, log, place):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))  # whose ids do not depend on earlier files
    asked = {"model": "m", "messages": [SYSTEM, USER], "cache_salt": "mine"}
    line = {**(asked if place is None else {place: asked}), "response": log, "timestamp": 1500}
    (request,) = read_trace(written(line), tokenizer=tmp_path).requests
    chat = written({"messages": [SYSTEM, USER, REPLY]}, name="chat.jsonl")
    (expected,) = read_trace(chat, tokenizer=tmp_path).requests
    n_known = expected.known_tokens
    assert request.text[: n_known * 4] == expected.text[: n_known * 4]
    assert (request.prompt_tokens, request.known_tokens) == (expected.prompt_tokens, n_known)
    assert request.boundaries == expected.boundaries
    assert (request.at, request.namespace) == (1.5, "mine")


def test_a_logged_request_without_its_answer_has_the_length_that_was_logged(written):
    trace = read_trace(written({"messages": [USER], "usage": {"completion_tokens": 9}}, {"messages": [USER]}))
    assert [one.output_tokens for one in trace.requests] == [9, 0]
    assert trace.requests[0].known_tokens == trace.requests[0].prompt_tokens
    assert trace.notes == ("2 requests without their answer: it is not cached",)


def test_logged_turns_of_a_session_share_a_text(written):
    first = {"session_id": 1, "messages": [USER], "response": "So it is."}
    other = {"session_id": 2, "messages": [REPLY, USER], "response": "No."}
    second = {"session_id": 1, "messages": [USER, REPLY, USER], "response": "No."}
    trace = read_trace(written(first, other, second))
    assert trace.requests[0].text is trace.requests[2].text
    assert [one.session for one in trace.requests] == ["1", "2", "1"]


def test_a_logged_prompt_of_text_is_a_request(written):
    (request,) = read_trace(written({"prompt": "Once upon a", "completion": " time"})).requests
    assert (request.prompt_tokens, request.output_tokens) == (3, 1)
    assert not request.boundaries.known


# -- conversations and documents -----------------------------------------------


def test_sharegpts_answers_are_requests(written, tmp_path):
    more = {"id": "x", "conversations": [{"from": "gpt", "value": "Hi."}, *SHAREGPT["conversations"]] * 2}
    path = written("[", f"{SHAREGPT}".replace("'", '"'), ",", f"{more}".replace("'", '"'), "]")
    trace = read_trace(path)
    expected = read_trace(written({"messages": [USER, REPLY]}, name="chat.jsonl")).requests[0]
    assert (trace.requests[0].text, known(trace)[0]) == (expected.text, known(trace)[0])
    assert [one.session for one in trace.requests] == ["x 1", "x 2", "x 2", "x 2"]


def test_conversations_without_an_answer_are_counted(written):
    trace = read_trace(written(SHAREGPT, {"conversations": [{"from": "human", "value": "?"}]}))
    assert trace.notes == ("1 conversations without an answer are left out",)


def test_turns_of_unknown_roles_are_left_out_and_counted(written):
    parrot = {"conversations": [{"from": "parrot", "value": "?"}, *SHAREGPT["conversations"]]}
    trace = read_trace(written(SHAREGPT, parrot, {"conversations": [{"from": "parrot", "value": "?"}]}))
    assert trace.requests[0].text == trace.requests[1].text
    left = "1 conversations without an answer are left out", "2 turns of unknown roles are left out: parrot"
    assert trace.notes == left


def test_sharegpts_turns_may_have_role_and_content(written):
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So it is."}]
    first, second = read_trace(written(SHAREGPT, {"conversations": turns})).requests
    assert first.text == second.text


def test_questions_of_a_document_share_it_and_nothing_else(written):
    story = {**STORY, "questions": [{"question": "Who?", "answers": ["He."]}, {"question": "Why?", "answers": []}]}
    first, second = read_trace(written(story)).requests
    n_document, n_he = words("Once upon.", "He.")
    shared = 4 * (3 + n_document)
    assert first.text[:shared] == second.text[:shared]
    assert first.text[shared:] != second.text[shared:]
    assert (first.session, second.session) == ("d", "d")
    assert (first.output_tokens, second.output_tokens) == (n_he + 1, 1)


def test_book_continues_and_restarts_where_the_context_ends(written, monkeypatch):
    monkeypatch.setattr(documents, "CONTEXT_TOKENS", 12)
    chapter = {**CHAPTER, "text": "a b c d"}
    other = {**chapter, "id": "author_other/one"}
    trace = read_trace(written(chapter, chapter, chapter, other))
    assert [(one.session, one.prompt_tokens) for one in trace.requests] == [
        ("author_book 0", 5),
        ("author_book 0", 10),
        ("author_book 1", 5),
        ("author_other 0", 5),
    ]
    assert trace.requests[0].text is trace.requests[1].text


def test_versions_of_a_prompt_are_a_session_in_order(written):
    trace = read_trace(written(VERSION, {**VERSION, "version": 2, "text": "You are kind and wise."}))
    first, second = trace.requests
    assert first.session == second.session == "f"
    shared = 4 * (3 + words("You are kind")[0])
    assert first.text[:shared] == second.text[:shared]
    assert first.output_tokens == 0
