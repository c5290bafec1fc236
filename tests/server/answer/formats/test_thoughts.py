"""Calls within reasoning that is never closed, calls that are cut off, and answers that end with one call."""

from __future__ import annotations

import pytest

from headwater.server.answer.formats import REASONING, TOOLS
from headwater.server.answer.formats.parser import AnswerParser, CallArguments, CallBegin, Content, Reasoning, joined
from tests.server.answer.formats.cases import WEATHER_TOOLS, WRITTEN, parse, shape

BONN, PING = ("weather", {"city": "Bonn"}), ("ping", {})
every_format = pytest.mark.parametrize("name", TOOLS)


def parsed(text, name, **kwargs):
    """Return the deltas of an answer, which must not depend on its pieces."""
    found = []
    for pieces in ([text], text):
        parser = AnswerParser(REASONING["think"], True, TOOLS[name], WEATHER_TOOLS, **kwargs)
        found.append(joined([delta for piece in pieces for delta in parser.push(piece)] + parser.finish()))
    assert found[0] == found[1]
    return found[0]


@every_format
def test_whole_call_in_an_unclosed_thought_is_a_call(name):
    text = f"I need it.\n{WRITTEN[name]([BONN, PING])}"
    assert shape(parsed(text, name)) == ["r:I need it.", BONN, PING]
    assert shape(parsed(f"{text}\nSo.", name)) == ["r:I need it.", BONN, PING, "c:So."]
    assert shape(parse(["<think>\n", *text], name)) == ["r:I need it.", BONN, PING]


@every_format
@pytest.mark.parametrize("made", [[BONN], [("nowhere", {})], []])
def test_call_in_a_closed_thought_is_a_mention(name, made):
    thought = f"I could write {TOOLS[name].open} or {WRITTEN[name](made) if made else ''} here."
    assert shape(parsed(f"{thought}\n</think>\n\nYes.", name)) == [f"r:{thought}", "c:Yes."]


@every_format
@pytest.mark.parametrize(
    "mention",
    [
        lambda name: TOOLS[name].open,
        lambda name: f"{TOOLS[name].open} here",
        lambda name: WRITTEN[name]([("nowhere", {"city": "Bonn"})]),
        lambda name: WRITTEN[name]([BONN]).partition("Bonn")[0],
    ],
)
def test_mention_in_an_unclosed_thought_stays_reasoning(name, mention):
    thought = f"I could use {mention(name)}"
    assert parsed(thought, name) == [Reasoning(thought)]


@every_format
def test_call_after_a_mention_in_an_unclosed_thought_is_a_call(name):
    text = f"I could use {TOOLS[name].open}, so:\n{WRITTEN[name]([BONN])}"
    assert shape(parsed(text, name)) == [f"r:I could use {TOOLS[name].open}, so:", BONN]


@every_format
def test_thought_after_a_mention_is_streamed(name):
    parser = AnswerParser(REASONING["think"], True, TOOLS[name], WEATHER_TOOLS)
    parser.push(f"I could use {TOOLS[name].open} plain nonsense")
    assert joined(parser.push(" and so on")) == [Reasoning(" and so on")]


@every_format
def test_forced_call_that_is_cut_leaves_no_markup(name):
    text = f"Hm.</think>\n\n{WRITTEN[name]([BONN, PING])}"
    for at in range(len("Hm.</think>"), len(text)):
        parts = parsed(text[:at], name, forced=True)
        assert not any(isinstance(part, Content) for part in parts)
        assert [part.name for part in parts if isinstance(part, CallBegin)] in ([], ["weather"], ["weather", "ping"])


@every_format
def test_call_by_choice_that_is_cut_before_its_name_is_text(name):
    text = WRITTEN[name]([BONN])
    for at in range(1, text.index("weather") + 1):
        assert parsed(f"</think>so {text[:at]}", name) == [Content(f"so {text[:at]}")]


@every_format
def test_answer_of_one_call_ends_with_it(name):
    for text in (f"Hm.\n</think>\n\n{WRITTEN[name]([BONN, PING])}\nSo.", f"Hm.\n{WRITTEN[name]([BONN, PING])}"):
        assert shape(parsed(text, name, one=True)) == ["r:Hm.", BONN]


@pytest.mark.parametrize("name", ["qwen_xml", "minimax_xml", "kimi"])
def test_call_of_a_strict_tool_without_its_outer_tag_is_text(name):
    text = WRITTEN[name]([PING]).removeprefix(TOOLS[name].open).strip()
    strict = {"ping": WEATHER_TOOLS["ping"].model_copy(update={"strict": True})}
    assert shape(parse([text], name)) == [PING]
    assert parse([text], name, tools=strict) == [Content(text)]


def test_call_of_a_value_that_is_cut_stays_incomplete():
    text = WRITTEN["qwen_xml"]([BONN])
    cut = text[: text.index("\n</function>")]
    assert parsed(f"</think>{cut}", "qwen_xml")[-1] == CallArguments('{"city": "Bonn"')
