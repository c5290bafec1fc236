"""Answers lose the space that their template writes before the content."""

import pytest

from headwater.models.files import embedded
from headwater.server.answer.formats import reasoning_format
from headwater.server.answer.formats.parser import AnswerParser, CallBegin, Content
from headwater.server.answer.forms import RecordingParser
from headwater.server.prompt.rules import writes_space
from headwater.server.prompt.template import ChatTemplate
from headwater.server.prompt.written import WrittenCalls
from tests.server import templates

INSTRUCTED = (  # as Llama 2's and Mistral's
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
NAMED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:SPACE{% endif %}"
)


def content(pieces: list[str], space: bool, thinks: bool = False) -> str:
    parser = AnswerParser(reasoning_format("think", "") if thinks else None, thinking=thinks)
    recorded = RecordingParser(parser, WrittenCalls(), "", "call_", "</think>", space)
    deltas = [delta for piece in pieces for delta in recorded.push(piece)] + recorded.finish()
    return "".join(delta.text for delta in deltas if isinstance(delta, Content))


def test_space_is_known_from_the_template_and_the_prompts_end() -> None:
    assert writes_space(ChatTemplate((embedded() / "chat_template.jinja").read_text()))
    assert writes_space(ChatTemplate(INSTRUCTED))
    assert writes_space(ChatTemplate(NAMED.replace("SPACE", "")))
    assert not writes_space(ChatTemplate(NAMED.replace("SPACE", " ")))
    assert not writes_space(ChatTemplate(templates.REASONING))
    assert not writes_space(ChatTemplate("{{ raise_exception('no') }}"))


@pytest.mark.parametrize("pieces", [[" Berta Wesworth"], [" ", "Berta", " Wesworth"], ["", " Ber", "ta Wesworth"]])
def test_only_the_first_space_of_the_content_is_dropped(pieces: list[str]) -> None:
    assert content(pieces, space=True) == "Berta Wesworth"
    assert content(pieces, space=False) == " Berta Wesworth"
    assert content([" ", *pieces], space=True) == " Berta Wesworth"


def test_content_after_reasoning_loses_its_space() -> None:
    assert content(["Hm.\n</think>\n\n", " Berta"], space=True, thinks=True) == "Berta"


def test_calls_after_dropped_space_are_kept_as_written() -> None:
    class Calls:
        def push(self, text: str) -> list[object]:
            return [Content(" I look.\n"), CallBegin("f", "call_1")]

        def finish(self) -> list[object]:
            return []

    written = WrittenCalls()
    recorded = RecordingParser(Calls(), written, "", "call_", "</think>", True)
    assert recorded.push(" I look.\n<call>f</call>")[0] == Content("I look.\n")
    recorded.finish()
    assert "<call>f</call>" in str(vars(written))
