"""Sources of texts for traces, and conversations made of them."""

import gzip
import json
from array import array

import pytest
import zstandard

from headwater.errors import TraceError
from headwater.server.prompt.chat import ChatPrompter
from headwater.server.prompt.template import ChatTemplate
from headwater.server.requests.messages import Conversation
from headwater.traces import source
from headwater.traces.chat import Chat, text_of
from headwater.traces.source import Source
from headwater.traces.tokens import Vocabulary, Words
from tests.server.fake_engine import byte_tokenizer

RECORDS = [{"number": number, "text": "ä\n,]}" * number} for number in range(40)]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)
PACKERS = {
    "plain": bytes,
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
    "frames": lambda text: zstandard.compress(text[:500]) + zstandard.compress(text[500:]),
}


@pytest.fixture(params=PACKERS)
def packed(request, tmp_path):
    """Writes a text, packed in each of the ways; the name does not tell which."""

    def write(text):
        path = tmp_path / "some.jsonl"
        path.write_bytes(PACKERS[request.param](text.encode()))
        return path

    return write


def test_lines_are_records_however_they_are_packed(packed):
    assert list(Source(packed(LINES)).records()) == RECORDS


def test_empty_lines_are_none_and_count(packed):
    read = Source(packed("\n \n" + LINES.replace("\n", "\n\n")))
    assert list(read.records()) == RECORDS
    assert read.place == f"line {2 * len(RECORDS) + 2}"


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_an_array_is_read_element_by_element(tmp_path, monkeypatch, indent, chunk):
    monkeypatch.setattr(source, "CHUNK_BYTES", chunk)
    path = tmp_path / "some.json"
    path.write_text(json.dumps(RECORDS, ensure_ascii=False, indent=indent))
    assert list(Source(path).records()) == RECORDS


def test_lists_of_tokens_are_lines_and_no_array(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text("[1, 2]\n[3]\n")
    assert list(Source(path).records()) == [[1, 2], [3]]


def test_line_that_is_not_json_is_an_error_with_its_number(packed):
    path = packed(LINES + "{oops\n")
    with pytest.raises(TraceError, match=rf"some\.jsonl, line {len(RECORDS) + 1}: no JSON: Expecting property name"):
        list(Source(path).records())


def test_truncated_array_is_an_error_with_its_last_element(tmp_path):
    path = tmp_path / "some.json"
    path.write_text(json.dumps(RECORDS)[:-20])
    with pytest.raises(TraceError, match=r"element 39: then no JSON"):
        list(Source(path).records())


@pytest.mark.parametrize("way", ["gzip", "zstd"])
def test_file_that_cannot_be_unpacked_is_an_error(tmp_path, way):
    path = tmp_path / "some.jsonl"
    text = "".join(f"{number * 7919 % 10007}\n" for number in range(5000))
    whole = bytearray(PACKERS[way](text.encode()))
    whole[len(whole) // 2] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(TraceError, match=r"some\.jsonl, (after )?line [\d,]+: (cannot be unpacked|no JSON)"):
        list(Source(path).records())


APPENDS = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

SYSTEM = {"role": "system", "content": "Be kind."}
USER, REPLY = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Thus."}
TOOL = {"role": "tool", "content": "42"}
LONG = [SYSTEM, USER, REPLY, {"role": "user", "content": "And how?"}, REPLY, TOOL, REPLY]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return Vocabulary(folder)


@pytest.fixture(scope="module")
def prompter():
    return ChatPrompter(byte_tokenizer(), ChatTemplate(APPENDS))


def ids(request, end=None):
    return tuple(array("i", request.text))[: request.prompt_tokens if end is None else end]


@pytest.mark.parametrize("reply", [2, 4, 6])
def test_a_prompt_and_its_boundaries_are_the_servers(vocabulary, prompter, reply):
    chat = Chat(vocabulary, LONG)
    request = chat.request("a", chat.text(), reply)
    prompt = prompter.prepare(Conversation(tuple(LONG[:reply])))
    assert ids(request) == prompt.prompt
    assert request.boundaries == prompt.boundaries


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [SYSTEM, USER, REPLY, USER], [SYSTEM]])
def test_a_prompt_without_its_answer_is_the_servers_too(vocabulary, prompter, messages):
    text, boundaries = Chat(vocabulary, messages).asked()
    prompt = prompter.prepare(Conversation(tuple(messages)))
    assert tuple(array("i", text)) == prompt.prompt
    assert boundaries == prompt.boundaries


def test_answer_is_known_up_to_the_models_end_mark(vocabulary):
    chat = Chat(vocabulary, LONG)
    request = chat.request("a", chat.text(), 2)
    end = byte_tokenizer().token_to_id("<|im_end|>")
    assert ids(request, request.known_tokens)[request.prompt_tokens :] == (*b_ids("Thus."), end)
    assert request.output_tokens == 6


def b_ids(text):
    return byte_tokenizer().encode(text).ids


def test_next_prompt_continues_the_answer():
    chat = Chat(Words(), LONG)
    text = chat.text()
    requests = [chat.request("a", text, reply) for reply in (2, 4, 6)]
    assert [one.text is text for one in requests] == [True] * 3
    assert requests[0].known_tokens < requests[1].prompt_tokens < requests[1].known_tokens < requests[2].prompt_tokens


def test_a_message_is_all_that_a_template_writes_of_it():
    parts = [{"type": "text", "text": "a"}, "b", {"type": "image_url"}]
    assert text_of({"role": "user", "content": parts}) == "ab"
    assert text_of({"role": "user", "content": None}) == ""
    called = text_of({"role": "assistant", "content": "x", "tool_calls": [{"b": 1, "a": 2}]})
    assert called == 'x[{"a": 2, "b": 1}]'
