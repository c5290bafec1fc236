"""Properties of every format: cuts do not matter, no text raises, no text is lost."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.server.answer.formats import REASONING, TOOLS, reasoning_format, tool_format
from headwater.server.answer.formats.parser import AnswerParser, CallArguments, CallBegin, Content, Reasoning, joined
from tests.server import templates
from tests.server.answer.formats.cases import WEATHER_TOOLS, WRITTEN, cut, cuts, parse, shape

MARKUP = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=weather>", "<function=", "</function>",
    "<parameter=city>\n", "<parameter=days>\n", "<parameter=", "\n</parameter>\n", "</parameter>",
    '{"name": "weather", "arguments": ', '{"name": "ping", "arguments": {}}', '{"city": "Bonn"}', '{"arguments": {',
    "<TOOLCALL>", "</TOOLCALL>", "<tool_calls>", "</tool_calls>", "<|tool_call|>", "[", "]", ", ",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "functions.weather:0", "ping",
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="weather">', "</invoke>", '<parameter name="city">',
    '<parameter name="days">', "<|tool_call_start|>", "<|tool_call_end|>", "weather(", "city=", ")", "'", "=",
    '"name": "x"', "}", "{", '"', "\\", "\n", " ", "3", "true", "Grüße 🙂", "text", ">", "<", "[",
)  # fmt: skip
answers = st.lists(st.sampled_from(MARKUP), max_size=14).map("".join)
formats = st.sampled_from([None, *TOOLS])


@given(text=answers, places=cuts, tool_format=formats, thinking=st.booleans())
def test_however_an_answer_is_cut_it_is_the_same(text, places, tool_format, thinking):
    whole = parse([text], tool_format, thinking)
    assert parse(cut(text, places), tool_format, thinking) == whole
    assert parse(text, tool_format, thinking) == whole  # in single characters


@given(text=answers, tool_format=formats, thinking=st.booleans())
def test_every_word_of_an_answer_comes_out_somewhere(text, tool_format, thinking):
    """Apart from markup, all letters are there in their order."""
    out = []
    for delta in parse([text], tool_format, thinking):
        out.append(delta.name if isinstance(delta, CallBegin) else delta.text)
    for word in ("Grüße", "text", "Bonn"):
        assert "".join(out).count(word) == text.count(word)


@given(text=answers, places=cuts, name=st.sampled_from([*TOOLS]))
def test_answer_with_truncated_calls_parses_equally_in_any_pieces(text, places, name):
    whole = parse([begun := WRITTEN[name](TWO)[:-9] + text], name)
    assert parse(cut(begun, places), name) == whole
    assert parse(begun, name) == whole


TWO = [("weather", {"city": "Bonn", "tags": ["</x>", '"}']}), ("ping", {})]


@pytest.mark.parametrize("name", TOOLS)
def test_two_calls_between_texts_are_read_and_all_but_markup_is_content(name):
    text = f"I look.\n\n{WRITTEN[name](TWO)}\n\nDone."
    assert shape(parse([text], name)) == ["c:I look.", *TWO, "c:Done."]
    assert shape(parse(text, name)) == ["c:I look.", *TWO, "c:Done."]


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize(
    "end", ["", "[", "{", "[{", "nonsense", '{"name": 3}', "[]", '[{"arguments": {"city": "Bonn"}}']
)
def test_malformed_call_comes_back_as_text(name, end):
    text = f"so {TOOLS[name].open}{end}"
    assert parse([text], name) == [Content(text)]
    assert parse(text, name) == [Content(text)]


@pytest.mark.parametrize("name", TOOLS)
def test_truncated_call_is_not_closed_by_the_parser(name):
    text = WRITTEN[name](TWO[:1])
    begin, arguments = parse([text[: text.index("Bonn") + 2]], name)
    assert begin.name == "weather"
    assert arguments.text.endswith("Bo")


@given(text=st.text("<>/tcalo_ \n"), tool_format=formats)
def test_text_without_markup_is_content_to_the_letter(text, tool_format):
    if not re.search("<think>|<tool_call>", text):
        assert parse([text], tool_format) == joined([Content(text)])


@pytest.mark.parametrize("name", TOOLS)
def test_without_tools_a_call_is_content(name):
    text = f"so {TOOLS[name].open} and {TOOLS[name].close}"
    assert parse([text], name, tools={}) == [Content(text)]


@pytest.mark.parametrize("name", TOOLS)
def test_text_that_cannot_become_a_tag_is_shown_at_once(name):
    parser = AnswerParser(REASONING["think"], False, TOOLS[name], WEATHER_TOOLS)
    begun = TOOLS[name].open[:5]
    assert joined(parser.push("Well ")) == [Content("Well")]
    assert joined(parser.push(f"then {begun}")) == [Content(" then")]
    assert joined(parser.push("box>")) == [Content(f" {begun}box>")]


def test_deltas_are_joined_by_kind():
    call = CallBegin("f")
    parts = [
        Reasoning("a"),
        Reasoning("b"),
        Content(""),
        Content("c"),
        call,
        call,
        CallArguments("{"),
        CallArguments("}"),
    ]
    assert joined(parts) == [Reasoning("ab"), Content("c"), call, call, CallArguments("{}")]


def test_formats_are_detected_from_the_template_or_named():
    assert reasoning_format("auto", templates.REASONING) is REASONING["think"]
    assert reasoning_format("auto", templates.DEFAULT_SYSTEM) is None
    assert reasoning_format("auto", "created by Minimax based on MiniMax-M1 model.") is REASONING["think"]
    assert reasoning_format("none", templates.REASONING) is None
    assert tool_format("auto", templates.DEFAULT_SYSTEM) is None
    assert tool_format("auto", "<tool_call>\n<function=x>\n<parameter=y>") is TOOLS["qwen_xml"]
    assert tool_format("auto", '<tool_call>\n{\\"name\\": x, \\"arguments\\": y}') is TOOLS["hermes"]
    assert tool_format("hermes", "") is TOOLS["hermes"]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('\'<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>.\'', "hermes"),
        ('{{- \'<TOOLCALL>[{{"name": "tool_name1", "arguments": "tool_args1"}}, \' -}}', "nemotron"),
        ("<|tool_calls_section_begin|>{%- for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}", "kimi"),
        ("<|bom|><|assistant|> {{ '<tool_calls>[' }}{{ '{\"name\": \"' }}{{ '\", \"arguments\": ' }}", "jamba"),
        ('<tool_calls>\\n{"name": <tool-name>, "arguments": <args-json-object>}\\n...\\n</tool_calls>', "minimax"),
        (
            '<minimax:tool_call>\n<invoke name="tool-name-1">\n<parameter name="param-key-1">x</parameter>',
            "minimax_xml",
        ),
        ("respond with <|tool_call|> followed by a JSON list of tools used", "granite"),
    ],
)
def test_marks_of_families_templates_tell_their_format(template, name):
    assert tool_format("auto", template) is TOOLS[name]
