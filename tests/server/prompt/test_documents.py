"""Documents sent with a conversation: each is a segment, whether the template shows documents or not."""

import pytest

from headwater.errors import TemplateError
from headwater.server.prompt.chat import ChatPrompter
from headwater.server.prompt.segments import SegmentEncoder
from headwater.server.prompt.template import ChatTemplate
from headwater.server.requests.messages import conversation
from tests.server import templates
from tests.server.client import error, send, send_all
from tests.server.prompt.segmented import SEP, TOKENIZERS, ids_of, shown, user

DOCUMENTS = [{"title": "Rivers", "text": "The Onda is long."}, {"text": "The Vell is short."}]
SHOWN = ["Rivers\nThe Onda is long.\n\n", "The Vell is short.\n\n"]
# as Granite's template does
READS = "{% for document in documents or [] %}<|im_start|>document {{ document | tojson }}<|im_end|>\n{% endfor %}"
BY_ITSELF = "{% for document in documents %}<|segment|>{{ document.text }}{% endfor %}<|segment|>"
BOTH = pytest.mark.parametrize("tokenizer", TOKENIZERS)


def prepare(tokenizer, messages, template=templates.SILENT, documents=DOCUMENTS):
    prompter = ChatPrompter(tokenizer, ChatTemplate(template), SegmentEncoder(tokenizer))
    return prompter.prepare(conversation(messages, documents=documents))


@BOTH
def test_documents_stand_before_the_last_query_as_if_written_there_by_hand(tokenizer):
    earlier = [user("hello"), {"role": "assistant", "content": "hi"}]
    prompt = prepare(tokenizer(), [*earlier, user("ask"), {"role": "tool", "content": "3"}])
    by_hand = user("".join(SEP + text for text in SHOWN) + f"{SEP}ask")
    written = prepare(tokenizer(), [*earlier, by_hand, {"role": "tool", "content": "3"}], documents=[])
    assert (prompt.prompt, prompt.segments) == (written.prompt, written.segments)
    assert shown(tokenizer(), prompt.prompt, prompt.segments) == SHOWN


@BOTH
def test_documents_are_not_placed_before_a_tool_result_in_a_user_message(tokenizer):
    result = user("<tool_response>\n3\n</tool_response>")
    prompt = prepare(tokenizer(), [user("ask"), result])
    ending = ids_of(tokenizer(), SEP, f"ask<|im_end|>\n<|im_start|>user\n{result['content']}")
    assert str(ending)[1:-1] in str(prompt.prompt)


@BOTH
def test_template_that_reads_documents_shows_them(tokenizer):
    prompt = prepare(tokenizer(), [user("ask")], READS + templates.SILENT)
    assert shown(tokenizer(), prompt.prompt, prompt.segments) == [document["text"] for document in DOCUMENTS]
    text = tokenizer().decode(prompt.prompt, skip_special_tokens=False).replace(SEP, "")
    assert text.startswith('<|im_start|>document {"title": "Rivers", "text": "The Onda is long."}<|im_end|>')
    assert "<|im_start|>user\nask<|im_end|>" in text


@BOTH
def test_template_that_separates_documents_itself_is_left_to_it(tokenizer):
    prompt = prepare(tokenizer(), [user("ask")], "sys" + BY_ITSELF + "{{ messages[0].content }}")
    assert prompt.prompt == ids_of(tokenizer(), "sys", SEP, DOCUMENTS[0]["text"], SEP, DOCUMENTS[1]["text"], SEP, "ask")
    assert shown(tokenizer(), prompt.prompt, prompt.segments) == [document["text"] for document in DOCUMENTS]


def test_next_turn_may_have_other_documents():
    """So the common prefix of the two turns ends before the documents."""
    earlier = [user("hello"), {"role": "assistant", "content": "hi"}]
    for tokenizer in TOKENIZERS:
        prompt = prepare(tokenizer(), [*earlier, user("ask")])
        assert prompt.boundaries.query_end <= prompt.segments[0].start


def test_documents_without_a_user_message_are_refused():
    with pytest.raises(TemplateError, match=r"2 documents .* none of the 1 messages"):
        prepare(TOKENIZERS[0](), [{"role": "system", "content": "a"}])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_both_chat_endpoints_take_documents(engine, path):
    asked = {"messages": [user("ask")]} if "chat" in path else {"input": "ask"}
    requests = [("POST", path, {"json": {**asked, "documents": sent}}) for sent in (DOCUMENTS, [], None)]
    assert {answer.status_code for answer in send_all(engine, requests)} == {200}
    first, empty, none = engine.seen
    assert shown(engine.tokenizer, first.prompt, first.segments) == SHOWN
    assert empty.prompt == none.prompt != first.prompt


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([{"title": "a"}], "documents.0.text"),
        ([{"text": ""}], "documents.0.text"),
        ([{"text": 1}], "documents.0.text"),
        (["a"], "documents.0"),
        ([{"text": "a"}] * 1025, "1024"),
    ],
)
def test_malformed_document_is_refused(engine, documents, said):
    body = {"messages": [user("ask")], "documents": documents}
    assert said in error(send(engine, "POST", "/v1/chat/completions", json=body))["message"]
