"""A conversation's text and boundaries are what the server makes of it with a template that only appends."""

from __future__ import annotations

from array import array

import pytest

from headwater.server.prompt.chat import ChatPrompter
from headwater.server.prompt.template import ChatTemplate
from headwater.server.requests.messages import Conversation
from headwater.traces.chat import Chat, text_of
from headwater.traces.tokens import Vocabulary, Words
from tests.server.fake_engine import byte_tokenizer

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
