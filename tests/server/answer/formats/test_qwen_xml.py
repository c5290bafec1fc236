"""XML calls with a tag for each parameter: values get their types from the tool's schema."""

from __future__ import annotations

import pytest

from headwater.server.answer.formats import TOOLS
from headwater.server.answer.formats.grammar import ALL_JSON_TYPES, Grammar, encoded, property_schema, types_of
from headwater.server.answer.formats.parser import AnswerParser, CallArguments, CallBegin, Content
from headwater.server.requests.tools import FunctionDefinition
from tests.server.answer.formats.cases import WEATHER, WEATHER_TOOLS, parse, shape


def call(*parameters, name="weather"):
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


BONN, PING = call(("city", "Bonn")), call(name="ping")
CALLED = ("weather", {"city": "Bonn"})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (BONN, [CALLED]),
        (f"I look.\n\n{BONN}\n{PING}", ["c:I look.", CALLED, ("ping", {})]),
        (f"{BONN}\nand\n{PING}\nDone.", [CALLED, "c:and", ("ping", {}), "c:Done."]),
        (call(("city", "3"), ("days", "3"), ("exact", "true")), [("weather", {"city": "3", "days": 3, "exact": True})]),
        (call(("exact", "False"), ("note", "None")), [("weather", {"exact": False, "note": None})]),
        (call(("tags", '["a", "b"]'), ("note", "x"), ("unit", "C")),
         [("weather", {"tags": ["a", "b"], "note": "x", "unit": "C"})]),
        (call(("days", "three")), [("weather", {"days": "three"})]),
        (call(("x", "3"), ("y", "a b"), ("z", '{"a": 1}'), name="ping"),
         [("ping", {"x": 3, "y": "a b", "z": {"a": 1}})]),
        (call(("city", 'two\nlines "and" \\ quotes\n')), [("weather", {"city": 'two\nlines "and" \\ quotes\n'})]),
        (call(("city", "")), [("weather", {"city": ""})]),
        (call(("city", "<b>\n</para>")), [("weather", {"city": "<b>\n</para>"})]),
        ("<tool_call><function=weather><parameter=city>Bonn</parameter></function></tool_call>", [CALLED]),
        ("<tool_call><function=weather><parameter=city></parameter></function></tool_call>",
         [("weather", {"city": ""})]),
        (BONN.replace("</function>\n", ""), [CALLED]),
        (BONN.removesuffix("</tool_call>"), [CALLED]),
        (BONN.removesuffix("</tool_call>") + BONN, [CALLED, CALLED]),
        ("<tool_call>\nnonsense\n</tool_call>", ["c:<tool_call>\nnonsense\n</tool_call>"]),
        ("a <tool_call>\n<function", ["c:a <tool_call>\n<function"]),
        ("<tool_call><function=>x", ["c:<tool_call><function=>x"]),
        (f"a <tool_call> b {BONN}", ["c:a <tool_call> b", CALLED]),
        (call(("city", 'a "</parameter>" b')), [("weather", {"city": 'a "</parameter>" b'})]),
        (call(("city", "<a>\n</parameter>\n</a>")), [("weather", {"city": "<a>\n</parameter>\n</a>"})]),
        (call(("city", "a </function> </tool_call> b")), [("weather", {"city": "a </function> </tool_call> b"})]),
        (call(("city", "a\n<parameter=town>\nb")), [("weather", {"city": "a\n<parameter=town>\nb"})]),
        (call(("city", BONN)),
         [("weather", {"city": BONN.partition("\n</parameter>")[0]}), "c:</parameter>\n</function>\n</tool_call>"]),
        (BONN.replace("\n</parameter>", ""), [CALLED]),
        (BONN.replace("\n</parameter>\n", "</parameter>"), [CALLED]),
        (call(("city", "Bonn"), ("days", "3")).replace("Bonn\n</parameter>", "Bonn"),
         [("weather", {"city": "Bonn", "days": 3})]),
        (call(("days", "3"), ("tags", '["</parameter></function>"]')).replace("3\n</parameter>", "3"),
         [("weather", {"days": 3, "tags": ["</parameter></function>"]})]),
        (BONN.removeprefix("<tool_call>\n"), [CALLED]),
        (f"So:\n{BONN.removeprefix('<tool_call>')}\nand <function=nowhere>",
         ["c:So:", CALLED, "c:and <function=nowhere>"]),
        (BONN.replace("</tool_call>", PING.removeprefix("<tool_call>\n")), [CALLED, ("ping", {})]),
        ("<function=pin", ["c:<function=pin"]),
    ],
)  # fmt: skip
def test_calls_are_parsed_and_malformed_ones_stay_content(text, parts):
    assert shape(parse([text], "qwen_xml")) == parts
    assert shape(parse(text, "qwen_xml")) == parts


def test_strings_are_passed_on_as_they_come():
    parser = AnswerParser(None, False, TOOLS["qwen_xml"], WEATHER_TOOLS)

    def push(text):
        deltas = [delta for delta in parser.push(text) if delta not in (Content(""), CallArguments(""))]
        return [delta.text if isinstance(delta, CallArguments) else delta for delta in deltas]

    assert push("<tool_call>\n<function=weather>\n<para") == [CallBegin("weather"), "{"]
    assert push("meter=city>\nBo") == ['"city": ', '"', "Bo"]
    assert push('nn "') == ['nn \\"']
    assert push("\n</param") == []
    assert push("eter>\n<parameter=days>\n1") == ['"', ', "days": ']
    assert push("2\n</parameter>") == []
    assert push("</function>") == ["12", "}"]


@pytest.mark.parametrize("text", ["Bo", "Bonn\n</parameter>\n", "Bonn\n</parameter>\n<parameter=days>\n1"])
def test_truncated_call_is_not_closed_by_the_parser(text):
    begin, arguments = parse([f"<tool_call>\n<function=weather>\n<parameter=city>\n{text}"], "qwen_xml")
    assert begin == CallBegin("weather")
    assert "Bo" in arguments.text
    assert not arguments.text.endswith("}")


def test_text_before_the_first_parameter_ends_the_call_without_completing_it():
    deltas = parse([BONN.replace("<parameter=city>", "and so on <parameter=city>")], "qwen_xml")
    assert deltas[:2] == [CallBegin("weather"), CallArguments("{")]
    assert deltas[2].text.startswith("and so on")


def test_types_come_from_references_unions_and_choices():
    kinds = {name: types_of(property_schema(WEATHER, name), WEATHER) for name in ("city", "note", "unit", "nowhere")}
    assert kinds == {"city": {"string"}, "note": {"string", "null"}, "unit": {"string"}, "nowhere": ALL_JSON_TYPES}
    assert types_of({"type": ["integer", "null"]}, {}) == {"integer", "null"}
    assert types_of({"allOf": [{"type": "object"}, {}]}, {}) == {"object"}
    assert types_of({"const": 3}, {}) == {"integer"}
    loop = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"}
    assert types_of(loop, loop) >= {"null"}
    assert types_of({"$ref": "#/$defs/nothing"}, {}) == ALL_JSON_TYPES
    assert types_of(True, {}) == ALL_JSON_TYPES


@pytest.mark.parametrize("refers", [lambda i: "x0", lambda i: f"x{i + 1}"], ids=["to itself", "to the next"])
def test_schemas_that_refer_to_one_another_many_times_are_looked_at_once(refers):
    """Visiting them by every path would take 8 to the power of 16 steps."""
    definitions = {f"x{i}": {"anyOf": [{"$ref": f"#/$defs/{refers(i)}"}] * 8} for i in range(16)}
    assert types_of({"$ref": "#/$defs/x0"}, {"$defs": definitions}) == ALL_JSON_TYPES


def test_schema_with_malformed_required_requires_nothing():
    grammar = Grammar({})
    rule = TOOLS["qwen_xml"].rule(
        grammar, [FunctionDefinition(name="f", parameters={"properties": {"a": {}}, "required": 5})], True
    )
    assert ")?" in grammar.source(rule)


@pytest.mark.parametrize(
    ("text", "types", "json"),
    [
        ("5", {"string"}, '"5"'),
        ("5", {"number"}, "5"),
        (" 5.0 ", {"number"}, "5.0"),
        ("5.5", {"integer"}, '"5.5"'),
        ("True", {"boolean"}, "true"),
        ("null", {"string", "null"}, "null"),
        ("NaN", {"number"}, '"NaN"'),
        ("[1,", {"array"}, '"[1,"'),
        ("[" * 100_000, {"array"}, '"' + "[" * 100_000 + '"'),
    ],
)
def test_value_is_of_an_allowed_type_or_a_string(text, types, json):
    assert encoded(text, frozenset(types)) == json
