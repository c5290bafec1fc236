"""Segments and tokens of traces."""

import json
from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError, TraceError
from headwater.request import Boundaries, Fidelity, Span
from headwater.traces.read import make_trace, read_trace
from headwater.traces.recordings import PageHashes, Served, line_of
from headwater.traces.request import Request
from headwater.traces.tokens import WORD, Remembered, Vocabulary, Words
from tests.server.fake_engine import byte_tokenizer
from tests.traces.conftest import tokens

FIRST, SECOND = "One document. ", "Another, longer document. "


def texts(trace, number=0):
    """The ids of a request's segments."""
    request = trace.requests[number]
    return [trace.ids(request, span) for span in request.segments]


def one(*pieces):
    return Words().of("".join(pieces))


# -- token lists ---------------------------------------------------------------


def test_token_lists_name_segments_and_their_fidelity(written):
    line = {"input": [1, 2, 3, 4, 5, 6], "segments": [[1, 3], [3, 5]], "fidelity": "fast"}
    trace = read_trace(written(line, {"input": [1, 2]}, {**line, "exact": True}))
    assert [request.segments for request in trace.requests] == [(Span(1, 3), Span(3, 5)), (), ()]
    assert [request.fidelity for request in trace.requests][:2] == [Fidelity.FAST, Fidelity.BALANCED]
    assert texts(trace) == [tokens(2, 3), tokens(4, 5)]
    assert trace.has_segments


@pytest.mark.parametrize("spans", [[[2, 2]], [[0, 9]], [[2, 4], [3, 5]], [[3, 4], [0, 1]], [[0, 1.5]], [[1]]])
def test_invalid_spans_are_errors(written, spans):
    with pytest.raises(TraceError, match="line 1"):
        read_trace(written({"input": [1, 2, 3, 4, 5], "segments": spans}))


def test_unknown_fidelity_is_an_error(written):
    with pytest.raises(TraceError, match="perfect"):
        read_trace(written({"input": [1, 2, 3], "segments": [[0, 2]], "fidelity": "perfect"}))


# -- requests as servers take them -----------------------------------------------


def log(**body):
    return {"body": body, "response": "So it is."}


def user(content):
    return {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": content}]}


@pytest.mark.parametrize(
    "body",
    [
        user(f"<|segment|>{FIRST}<|segment|>{SECOND}<|segment|>Why?"),
        user([
            {"type": "text", "text": FIRST, "segment": True},
            {"type": "text", "text": SECOND, "segment": True},
            {"type": "text", "text": "Why?"},
        ]),
        {"prompt": f"Be kind.<|segment|>{FIRST}<|segment|>{SECOND}<|segment|>Why?"},
    ],
    ids=["separators", "parts", "prompt"],
)  # fmt: skip
def test_segments_are_marked_as_for_the_server(written, body):
    trace = read_trace(written(log(**body), log(**body, exact=True, fidelity="high")))
    lengths = [span.end - span.start for span in trace.requests[0].segments]
    assert lengths == [len(one(FIRST)), len(one(SECOND))]
    assert trace.requests[1].segments == ()
    assert trace.requests[1].fidelity is Fidelity.HIGH


def test_documents_stand_before_the_last_question(written):
    body = {**user("Why?"), "documents": [{"title": "Staff", "text": "Ann."}, {"text": "Bob."}]}
    trace = read_trace(written(log(**body)))
    (request,) = trace.requests
    assert [span.end - span.start for span in request.segments] == [len(one("Staff\nAnn.\n\n")), len(one("Bob.\n\n"))]
    assert request.segments[0].start > len(one("Be kind."))


def test_a_document_has_the_same_tokens_wherever_it_stands(written):
    orders = [(FIRST, SECOND), (SECOND, FIRST)]
    bodies = [user(f"<|segment|>{a}<|segment|>{b}<|segment|>Why?") for a, b in orders]
    trace = read_trace(written(*(log(**body) for body in bodies)))
    assert texts(trace, 0) == texts(trace, 1)[::-1]


def test_malformed_markup_is_text(written):
    said = "<|segment|>Said.<|segment|>"
    messages = [{"role": "user", "content": [{"type": "text", "text": said, "segment": False}]}]
    quoted = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "Why?"}]
    trace = read_trace(written(log(messages=messages), log(messages=quoted)))
    assert [request.segments for request in trace.requests] == [(), ()]


def test_a_prompt_that_begins_with_a_separator_leads_with_its_first_segment(written):
    trace = read_trace(written(log(prompt=f"<|segment|>{FIRST}<|segment|>{SECOND}<|segment|>Why?")))
    (span,) = trace.requests[0].segments
    assert (span.start, span.end) == (len(one(FIRST)), len(one(FIRST)) + len(one(SECOND)))


def test_a_conversation_keeps_the_segments_of_its_earlier_turns(written):
    first = user(f"<|segment|>{FIRST}<|segment|>Why?")["messages"]
    second = [*first, {"role": "assistant", "content": "So it is."}, {"role": "user", "content": "And then?"}]
    trace = read_trace(written(log(messages=first), log(messages=second)))
    assert trace.requests[0].segments == trace.requests[1].segments != ()


# -- passages --------------------------------------------------------------------


def test_passages_are_segments_and_the_question_comes_behind(written):
    passages = [{"title": "A", "text": FIRST}, {"title": "", "text": SECOND}]
    lines = [
        {"id": "q", "question": "Who?", "answers": ["He."], "passages": order} for order in (passages, passages[::-1])
    ]
    trace = read_trace(written(*lines))
    assert texts(trace, 0) == texts(trace, 1)[::-1]
    assert len(trace.requests[0].segments) == 2
    assert trace.requests[0].segments[-1].end < trace.requests[0].prompt_tokens
    assert trace.notes == ("4 passages, 2 of them different",)


@pytest.mark.parametrize("name", ["rag_hotpotqa/distractor_200", "rag_musique", "rag_nq_oracle", "rag_multi_news"])
def test_shared_sets_of_passages_are_read(data, name):
    trace = make_trace(name, data, limit=20)
    assert len(trace.requests) == 20
    assert all(request.segments for request in trace.requests)


# -- recordings ------------------------------------------------------------------


def recorded(written, *requests, page=4):
    """A recording of (prompt, its segments, answer)."""
    hashes = PageHashes(b"key", page)
    lines = [Served(page, "m").first_line().decode().strip()]
    for number, (prompt, spans, answer) in enumerate(requests):
        known = (*prompt, *answer)
        lengths = len(prompt), len(answer), len(known)
        request = Request("", hashes.of("", known), *lengths, float(number), None, Boundaries(), "", spans)
        lines.append(line_of(request, [hashes.segment("", prompt[s.start : s.end]) for s in spans]).decode().strip())
    return read_trace(written(*lines))


def test_a_recording_keeps_segments_without_their_text(written):
    document = [7, 8, 9, 10, 11]
    here, there = [1, 2, 3, *document, 4], [5, *document, 6, 6, 6]
    spans = (Span(3, 8),), (Span(1, 6),)
    trace = recorded(written, (here, spans[0], [4, 4]), (there, spans[1], [3]))
    assert not trace.has_token_ids
    assert [request.segments for request in trace.requests] == list(spans)
    assert texts(trace, 0) == texts(trace, 1)
    assert trace.block_tokens == 1
    assert [len(request.text) for request in trace.requests] == [4 * 11, 4 * 10]


def test_equal_prefixes_of_whole_pages_are_equal_in_a_recording_with_segments(written):
    lead, document = [1, 2, 3, 4, 5], [7, 8, 9, 10, 11]
    prompts = [[*lead, *document, 20, 21], [*lead, *document, 20, 22], [*lead[:-1], 6, *document, 20, 21]]
    trace = recorded(written, *((prompt, (Span(5, 10),), []) for prompt in prompts))
    keys = [trace.key(request, 12) for request in trace.requests]
    assert keys[0][:32] == keys[1][:32]
    assert keys[0][32:] != keys[1][32:]
    assert keys[0][:16] == keys[2][:16]
    assert keys[0][16:32] != keys[2][16:32]


def test_recordings_of_the_first_version_and_without_segments_stay_recordings_of_pages(written):
    line = json.dumps({"t": 1, "in": 3, "out": 1, "known": 3, "pages": ""})
    for version in (1, 2):
        head = json.dumps({"headwater_recording": version, "page_size": 64, "model": "m"})
        assert read_trace(written(head, line)).block_tokens == 64
    with pytest.raises(TraceError, match="version 3"):
        read_trace(written(json.dumps({"headwater_recording": 3, "page_size": 64, "model": "m"}), line))


# -- drawn -----------------------------------------------------------------------


def drawn(options="", **more):
    return make_trace(f"rag(sessions=200, documents=50, tokens=20{options})", **more)


def test_drawn_traffic_is_the_same_for_the_same_seed():
    assert drawn(seed=1).requests == drawn(seed=1).requests
    assert drawn(seed=1).requests != drawn(seed=2).requests
    assert drawn(limit=7, seed=1).requests == drawn(seed=1).requests[:7]


def test_request_has_distinct_documents_in_any_order():
    trace = drawn(", fewest=4, most=6")
    counts = {len(request.segments) for request in trace.requests}
    assert counts == {4, 5, 6}
    for number, request in enumerate(trace.requests):
        assert len(set(texts(trace, number))) == len(request.segments)
        assert request.segments[0].start == 256
        assert all(a.end == b.start for a, b in pairwise(request.segments))
        assert request.prompt_tokens == request.segments[-1].end + 32


@pytest.mark.parametrize("exponent", [0.5, 1.5])
def test_first_document_has_the_popularity_of_zipfs_law(exponent):
    """Count the draws of single documents, and compare the most frequent with Zipf within four standard deviations."""
    trace = make_trace(f"rag(sessions=2000, documents=50, zipf={exponent}, fewest=1, most=1)")
    often: dict[bytes, int] = {}
    for number in range(len(trace.requests)):
        (document,) = texts(trace, number)
        often[document] = often.get(document, 0) + 1
    share = 1 / sum(rank**-exponent for rank in range(1, 51))
    assert abs(max(often.values()) / 2000 - share) < 4 * (share * (1 - share) / 2000) ** 0.5


def test_turns_of_a_session_share_one_text_and_its_documents():
    first, second = drawn(", turns=2").requests[:2]
    assert first.text == second.text
    assert first.segments == second.segments
    assert second.prompt_tokens == first.known_tokens + 32
    assert second.boundaries.query_start == first.known_tokens


def test_documents_may_be_a_files_passages(written, tmp_path):
    record = {"question": "Who?", "answers": [], "passages": [{"title": "A", "text": f"number {i}."} for i in range(9)]}
    written(record, record, name="set.jsonl")
    trace = make_trace("rag(texts='set', sessions=99, fewest=2, most=3)", tmp_path)
    assert len({text for number in range(99) for text in texts(trace, number)}) == 9


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("sessions=0", "sessions is 0"),
        ("fewest=5, most=4", "most is 4"),
        ("documents=3", "most is 16, there are 3"),
        ("zipf=-1", "zipf"),
        ("fidelity='perfect'", "perfect"),
        ("popularity=2", "popularity"),
    ],
)
def test_impossible_drawn_traffic_is_an_error(options, told):
    with pytest.raises(ConfigError, match=told):
        make_trace(f"rag({options})")


@given(st.text())
def test_words_are_the_whole_text(text):
    assert "".join(WORD.findall(text)) == text


@given(st.lists(st.text(max_size=4)))
def test_equal_tokens_are_equal_text(texts):
    words = Words()
    made = [tuple(words.of(text)) for text in texts]
    assert len(set(made)) == len(set(texts))


def test_no_text_is_a_mark():
    words = Words()
    texts = [words.of(text) for text in ("begin", "mark", "user", "newline", "end", "\n", "<|im_start|>user\n")]
    marks = {*words.header("user"), *words.footer()}
    assert not marks & {token for text in texts for token in text}
    assert words.header("user") != words.header("assistant")


def test_words_are_about_as_many_as_a_models_tokens():
    assert len(Words().of("The quick brown fox jumps over the lazy dog.")) == 10
    assert len(Words().of("internationalization")) == 3
    assert len(Words().of("1234")) == 4
    assert len(Words().of("x" + " " * 12 + "y")) == 3


def test_a_vocabulary_gives_its_models_tokens(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    by_folder, by_file = Vocabulary(tmp_path), Vocabulary(tmp_path / "tokenizer.json")
    expected = array("i", byte_tokenizer().encode("Grüße").ids)
    assert by_folder.of("Grüße") == by_file.of("Grüße") == expected
    assert by_file.header("user") == array("i", byte_tokenizer().encode("<|im_start|>user\n").ids)
    assert len(by_file.footer()) == 2


def test_file_without_a_tokenizer_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json' holds no tokenizer"):
        Vocabulary(tmp_path)


def test_repeated_text_is_tokenised_once():
    class Counting(Words):
        calls = 0

        def of(self, text):
            self.calls += 1
            return super().of(text)

    counting = Counting()
    remembered = Remembered(counting)
    assert remembered.of("a b") == remembered.of("a b") == Words().of("a b")
    assert counting.calls == 1
