"""Grammars of calls: they accept exactly the texts that the parsers read as calls that fit the schema."""

from __future__ import annotations

from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer

from headwater.engine.constraint import without_tags
from headwater.server.answer.formats import TOOLS
from headwater.server.answer.formats.grammar import Grammar, literal, tag_tokens
from headwater.server.requests.structured import quoted
from headwater.server.requests.tools import FunctionDefinition
from tests.checkpoints.tokenizer import train
from tests.server.answer.formats.cases import WEATHER_TOOLS, WRITTEN, parse, shape
from tests.server.fake_engine import byte_tokenizer


@cache
def trained():
    """Return a tokenizer whose tags are tokens, as in most families."""
    return train(600, 1)


@cache
def vocabulary(tokenizer):
    end = tokenizer.token_to_id("<|im_end|>")
    return LLTokenizer(without_tags(tokenizer), n_vocab=tokenizer.get_vocab_size(), eos_token=end)


def taken(source, text, tokenizer=None):
    """Return the part of the text that the grammar accepts, and whether it may end there."""
    tokenizer = tokenizer or byte_tokenizer()
    matcher = LLMatcher(vocabulary(tokenizer), LLMatcher.grammar_from_lark(source))
    assert not matcher.get_error(), matcher.get_error()
    tokens = tokenizer.encode(text).ids
    size = matcher.try_consume_tokens(tokens)
    return tokenizer.decode(tokens[:size], skip_special_tokens=False), matcher.is_accepting()


def grammar_of(name, tools, tokenizer=None, one=True):
    grammar = Grammar(tag_tokens(tokenizer or byte_tokenizer()))
    return grammar.source(f"{grammar.tag(TOOLS[name].open)} {TOOLS[name].rule(grammar, list(tools), one)}")


def hermes(name, arguments):
    return WRITTEN["hermes"]([(name, arguments)])


def xml(name, values):
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


ALL = {"city": "Bonn", "days": 2, "exact": True, "tags": ["a", "b"], "note": "two\nlines </p>", "unit": "C"}


@pytest.mark.parametrize(
    ("name", "text", "called"),
    [
        ("hermes", hermes("weather", ALL), ("weather", ALL)),
        ("hermes", hermes("ping", {"any": [1]}), ("ping", {"any": [1]})),
        ("qwen_xml", xml("weather", ALL | {"exact": "true", "tags": '["a", "b"]'}), ("weather", ALL)),
        ("qwen_xml", xml("weather", {"city": "Bonn"}), ("weather", {"city": "Bonn"})),
        ("qwen_xml", xml("ping", {"any": "thing"}), ("ping", {"any": "thing"})),
        ("qwen_xml", xml("ping", {}), ("ping", {})),
    ],
)
def test_calls_allowed_by_the_grammar_are_parsed(name, text, called):
    for tokenizer in (byte_tokenizer(), trained()):
        assert taken(grammar_of(name, WEATHER_TOOLS.values(), tokenizer), text, tokenizer) == (text, True)
    assert shape(parse([text], name)) == [called]


@pytest.mark.parametrize("name", [name for name, tools in TOOLS.items() if tools.between is not None])
def test_formats_with_several_calls_between_their_tags_may_be_held_to_one(name):
    calls = [("weather", ALL), ("ping", {})]
    text = WRITTEN[name](calls)
    assert taken(grammar_of(name, WEATHER_TOOLS.values(), one=False), text) == (text, True)
    assert shape(parse([text], name)) == calls
    most, ended = taken(grammar_of(name, WEATHER_TOOLS.values()), text)
    assert "ping" not in most
    assert not ended
    one = WRITTEN[name](calls[:1])
    assert taken(grammar_of(name, WEATHER_TOOLS.values()), one) == (one, True)


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("arguments", [{}, {"city": 3}, {"city": "x", "unit": "K"}])
def test_no_format_takes_arguments_that_do_not_fit(name, arguments):
    text = WRITTEN[name]([("weather", arguments)])
    most, ended = taken(grammar_of(name, [WEATHER_TOOLS["weather"]]), text)
    assert (len(most) < len(text), ended) == (True, False) or ("xml" in name and arguments == {"city": 3})


@pytest.mark.parametrize(
    ("name", "text", "most"),
    [
        ("hermes", hermes("nowhere", {}), '<tool_call>\n{"name": "'),
        ("hermes", hermes("weather", {}), '<tool_call>\n{"name": "weather", "arguments": {'),
        ("hermes", hermes("weather", {"city": 3}), '<tool_call>\n{"name": "weather", "arguments": {"city": '),
        ("qwen_xml", xml("weather", {}), "<tool_call>\n<function=weather>\n<"),
        ("qwen_xml", xml("weather", {"city": "x", "unit": "K"}),
         "<tool_call>\n<function=weather>\n<parameter=city>\nx\n</parameter>\n<parameter=unit>\n"),
        ("qwen_xml", xml("weather", {"city": "x", "days": "soon"}),
         "<tool_call>\n<function=weather>\n<parameter=city>\nx\n</parameter>\n<parameter=days>\n"),
    ],
)  # fmt: skip
def test_bad_calls_are_stopped_where_they_go_wrong(name, text, most):
    assert taken(grammar_of(name, WEATHER_TOOLS.values()), text) == (most, False)


@pytest.mark.parametrize("name", TOOLS)
def test_names_and_keys_with_any_sign_are_written_as_they_are(name):
    tool = FunctionDefinition(
        name='o"d/d\\é', parameters={"type": "object", "properties": {"ü/k": {"type": "integer"}}, "required": ["ü/k"]}
    )
    source = grammar_of(name, [tool])
    value = {"ü/k": 1}
    text = WRITTEN[name]([(tool.name, value)])
    assert taken(source, text) == (text, True)


def test_schema_of_schemas_keeps_its_references():
    point = {
        "type": "object",
        "properties": {"x": {"type": "number"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    schema = {"type": "object", "properties": {"at": {"$ref": "#/$defs/P"}}, "required": ["at"], "$defs": {"P": point}}
    for name, text in (
        ("hermes", hermes("go", {"at": {"x": 1.5}})),
        ("qwen_xml", xml("go", {"at": '{"x": 1.5}'})),
    ):
        assert taken(grammar_of(name, [FunctionDefinition(name="go", parameters=schema)]), text) == (text, True)


def test_free_text_ends_at_its_mark_and_signs_are_quoted():
    grammar = Grammar({})
    source = grammar.source(f"{grammar.until('</a.b>')} {literal('!')}")
    assert taken(source, "x\n</aXb> y</a.b>!") == ("x\n</aXb> y</a.b>!", True)
    assert quoted("a_b</") == "a_b\\x{3c}\\x{2f}"


def test_tags_that_are_tokens_are_named_and_text_does_not_match_them():
    grammar = Grammar(tag_tokens(trained()))
    source = grammar.source(f"{grammar.until('</think>')} {grammar.tag('<tool_call>')} {grammar.tag('<other>')}")
    text = "hm\n</think><tool_call><other>"
    assert taken(source, text, trained()) == (text, True)
    assert taken(source, "hm<tool_call>", trained()) == ("hm", False)
    assert set(tag_tokens(byte_tokenizer())) == {"<|im_start|>", "<|im_end|>"}
