"""Sampling for tools and schemas, with a tokenizer whose tags are tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from llguidance import LLMatcher

from headwater.config import ServeConfig
from headwater.engine.constraint import ConstraintCompiler
from headwater.errors import ConstraintError
from headwater.request import Constraint, SamplingParams
from headwater.server.answer.dialect import Dialect, Start
from headwater.server.answer.formats import TOOLS
from headwater.server.requests.tools import FunctionDefinition, ToolUse
from tests.checkpoints.tokenizer import train
from tests.server import templates
from tests.server.answer.formats.cases import WEATHER_TOOLS, WRITTEN
from tests.server.answer.formats.test_grammar import hermes, taken, vocabulary

TEMPLATE = templates.REASONING + '{# <tool_call>{"name": …, "arguments": …} #}'
OPEN, CLOSED = "<|im_start|>assistant\n<think>\n", "<think>\n\n</think>\n\n"
PLAIN = SamplingParams()
CALL, THOUGHT = hermes("weather", {"city": "Bonn"}), "hm\n</think>\n\n"


@cache
def trained():
    return train(600, 1)


def shaped(use, end=CLOSED, form=None, config=ServeConfig(), template=TEMPLATE, limit=None):  # noqa: B008
    dialect = Dialect(template, config, trained())
    return dialect.shaped(PLAIN, Start(end, limit), dialect.enforced(use, "")[0], form)


def shape(end, mode="auto", form=None, config=ServeConfig()):  # noqa: B008
    return shaped(ToolUse(mode, WEATHER_TOOLS), end, form, config)


def test_tool_choice_none_bans_the_call_tag():
    banned = (trained().token_to_id("<tool_call>"), -100.0)
    assert shape(OPEN, "none") == SamplingParams(logit_bias=(banned,))
    dialect, use = Dialect(TEMPLATE, ServeConfig(), trained()), ToolUse("none", WEATHER_TOOLS)
    params = dialect.shaped(SamplingParams(logit_bias=((1, 2.0),)), Start(OPEN), use, None)
    assert params == SamplingParams(logit_bias=((1, 2.0), banned))


def test_reasoning_ends_with_its_token_and_the_call_begins_with_its_own():
    required = shape(OPEN, "required").constraint.source
    assert taken(required, THOUGHT + CALL, trained()) == (THOUGHT + CALL, True)
    assert taken(required, CALL, trained()) == ("", False)  # within reasoning no tag but the closing one
    assert taken(shape(CLOSED, "required").constraint.source, CALL, trained()) == (CALL, True)


def test_reasoning_may_precede_constrained_output_if_prompt_leaves_thinking_open():
    source = shape("<|im_start|>assistant\n", form=Constraint("json_schema", '{"type": "object"}')).constraint.source
    for text in ("{}", CALL, "<think>\n" + THOUGHT + "{}"):
        assert taken(source, text, trained()) == (text, True)


def test_tags_among_special_tokens_are_shown_to_the_parser():
    tokenizer = trained().from_str(trained().to_str())
    tokenizer.add_special_tokens(["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<think>"])
    kimi = Dialect(templates.REASONING + "{# <|tool_calls_section_begin|> #}", ServeConfig(), tokenizer)

    def shown(mode):
        params = kimi.shaped(PLAIN, Start(OPEN), ToolUse(mode, WEATHER_TOOLS), None)
        return {tokenizer.id_to_token(token) for token in params.shown_tokens}

    assert shown("auto") == {"<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<think>"}
    assert shown("none") == {"<think>"}
    assert shape(OPEN).shown_tokens == ()


def test_grammar_limits_a_list_format_to_one_call():
    listed = Dialect("<TOOLCALL>", ServeConfig(), trained())
    source = listed.shaped(PLAIN, Start(""), ToolUse("auto", WEATHER_TOOLS, one=True), None).constraint.source
    one, two = (WRITTEN["nemotron"]([("ping", {})] * count) for count in (1, 2))
    assert taken(source, "so " + one, trained()) == ("so " + one, True)
    assert not taken(source, "so " + two, trained())[1]
    free = Dialect("<TOOLCALL>", ServeConfig(tool_calls="free"), trained())
    assert free.shaped(PLAIN, Start(""), ToolUse("auto", WEATHER_TOOLS), None) == PLAIN


UNKNOWN, BROKEN = hermes("snow", {}), CALL.replace('"Bonn"', "3")


def auto(text, end=CLOSED, **tools):
    """Return the part of a text that an answer with tool_choice auto may have, and whether it may end there."""
    named = {name: WEATHER_TOOLS[name].model_copy(update={"strict": strict}) for name, strict in tools.items()}
    return taken(shaped(ToolUse("auto", named or WEATHER_TOOLS), end).constraint.source, text, trained())


def test_calls_by_choice_are_held_to_known_names_and_their_schemas():
    for text in ("", "No call.", f"So: {CALL}", f"{CALL}\n{hermes('ping', {'a': 1})} Well.", f"{CALL}</think> a"):
        assert auto(text) == (text, True)
    assert auto(f"So: {UNKNOWN}")[0].endswith('{"name": "')
    assert auto(BROKEN)[0] == BROKEN[: BROKEN.index("3")]
    assert not auto(CALL[:-20])[1]  # a call that has begun ends


def test_call_whose_tag_is_spelled_out_is_held_too():
    source = shape(CLOSED).constraint.source
    spelled = [
        i for part in ("<tool", "_call>", UNKNOWN.removeprefix("<tool_call>")) for i in trained().encode(part).ids
    ]
    matcher = LLMatcher(vocabulary(trained()), LLMatcher.grammar_from_lark(source))
    accepted = trained().decode(spelled[: matcher.try_consume_tokens(spelled)])
    assert accepted.endswith('{"name": "')


def test_reasoning_may_hold_anything_and_calls_after_it_are_held():
    for end, thought in ((OPEN, THOUGHT), ("<|im_start|>assistant\n", "<think>\n" + THOUGHT)):
        mused = thought.replace("hm", f"hm {UNKNOWN}")
        assert auto(mused + CALL, end) == (mused + CALL, True)
        assert auto(mused + UNKNOWN, end)[0] == mused + UNKNOWN[: UNKNOWN.index("snow")]
    assert auto("hm <tool_call> and no end", OPEN)[1]


def test_tool_that_is_not_strict_by_request_takes_any_object():
    for text, ends in ((BROKEN, True), (CALL.replace('"Bonn"}', '"Bonn"'), False), (UNKNOWN, False)):
        assert (auto(text, weather=False, ping=None) == (text, True)) == ends


def test_uncompilable_schema_is_dropped_unless_its_tool_is_strict():
    bad = FunctionDefinition(name="weather", parameters={"type": "nosuch"})
    compiler = ConstraintCompiler(trained(), trained().get_vocab_size(), (trained().token_to_id("<|im_end|>"),))

    def machine(strict):
        use = ToolUse("auto", {"weather": bad.model_copy(update={"strict": strict}), "ping": WEATHER_TOOLS["ping"]})
        return compiler.machine(shaped(use).constraint)

    loose = machine(None)
    for token in trained().encode(BROKEN).ids:
        assert loose.allowed()[token]
        loose.take(token)
    with pytest.raises(ConstraintError, match="nosuch") as refused:
        machine(True)
    assert refused.value.param == "tools"


def test_unknown_keywords_of_a_schema_are_ignored_unless_its_tool_is_strict():
    odd = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}, "required": ["a"]}
    compiler = ConstraintCompiler(trained(), trained().get_vocab_size(), (trained().token_to_id("<|im_end|>"),))
    use = ToolUse("auto", {"f": FunctionDefinition(name="f", parameters=odd)})
    constraint = shaped(use).constraint
    compiler.machine(replace(constraint, fallback=None))
    assert not taken(constraint.source, hermes("f", {"a": 3}), trained())[1]


def test_free_calls_are_held_for_strict_tools_only():
    free = ServeConfig(tool_calls="free")
    assert shape(CLOSED, config=free) == PLAIN
    strict = {**WEATHER_TOOLS, "weather": WEATHER_TOOLS["weather"].model_copy(update={"strict": True})}
    source = shaped(ToolUse("auto", strict), config=free).constraint.source
    assert taken(source, BROKEN, trained())[0] == BROKEN[: BROKEN.index("3")]
    assert taken(source, hermes("ping", {"a": 1}), trained())[1]


@pytest.mark.parametrize("name", TOOLS)
def test_every_format_holds_its_calls_by_choice(name):
    template = " ".join((TOOLS[name].open, *TOOLS[name].marks))
    config = ServeConfig(tool_format=name)
    params = Dialect(template, config, trained()).shaped(PLAIN, Start(""), ToolUse("auto", WEATHER_TOOLS), None)
    good = "So. " + WRITTEN[name]([("weather", {"city": "Bonn"})])
    assert taken(params.constraint.source, good, trained()) == (good, True)
    unknown = "So. " + WRITTEN[name]([("snow", {"city": "Bonn"})])
    accepted, ended = taken(params.constraint.source, unknown, trained())
    assert "snow" not in accepted
    assert not ended


@pytest.mark.parametrize(
    ("part", "keywords"),
    [
        ({"type": "object", "propertyNames": {"type": "string"}}, "propertyNames"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {}}, "not"),
        ({"type": "string", "pattern": "^(?!/).*"}, "pattern"),
        ({"type": "nosuch"}, "type"),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("name", ["hermes", "qwen_xml"])
def test_keyword_that_cannot_be_enforced_costs_only_its_tool_and_is_named(name, mode, part, keywords, caplog):
    nested = {"type": "object", "properties": {"secret": part}, "required": ["secret"]}
    odd = FunctionDefinition(name="odd", parameters={"type": "object", "properties": {"o": nested}, "required": ["o"]})
    dialect = Dialect("", ServeConfig(tool_format=name), trained())
    held, missing = dialect.enforced(ToolUse(mode, {"odd": odd, **WEATHER_TOOLS}), "")
    assert missing == [f"{keywords} of tool 'odd'"]
    assert f"of tool 1 of 3 is not enforced: {keywords}" in caplog.text
    assert "secret" not in caplog.text
    constraint = dialect.shaped(PLAIN, Start(""), held, None).constraint
    compiler = ConstraintCompiler(trained(), trained().get_vocab_size(), (trained().token_to_id("<|im_end|>"),))
    compiler.machine(replace(constraint, fallback=None))
    bad, good = (WRITTEN[name]([("weather", {"city": "x", "days": days})]) for days in ("no", 3))
    assert taken(constraint.source, good, trained()) == (good, True)
    assert not taken(constraint.source, bad, trained())[1]
    text = WRITTEN[name]([("odd", {"o": {"secret": {}}})])
    with pytest.raises(ConstraintError, match="tool 'odd' is strict") as refused:
        dialect.enforced(ToolUse(mode, {"odd": odd.model_copy(update={"strict": True})}), "")
    assert refused.value.param == "tools"
    assert "start:" not in str(refused.value)
    assert taken(constraint.source, text.partition("secret")[0], trained())[0].endswith(('{"', '": {"'))


def test_choice_that_would_end_within_itself_is_named_and_not_enforced():
    value = "a\n</parameter>\n</function>\nb"
    tool = FunctionDefinition(name="f", parameters={"type": "object", "properties": {"x": {"enum": ["y", value]}}})
    dialect = Dialect("", ServeConfig(tool_format="qwen_xml"), trained())
    held, missing = dialect.enforced(ToolUse("required", {"f": tool}), "")
    assert missing == ["a value that property 1 allows of tool 'f'"]
    assert held.tools["f"].parameters is None
    with pytest.raises(ConstraintError, match="property 1 allows cannot be written in the model's format of calls"):
        dialect.enforced(ToolUse("required", {"f": tool.model_copy(update={"strict": True})}), "")
    assert (
        Dialect("", ServeConfig(tool_format="hermes"), trained()).enforced(ToolUse("required", {"f": tool}), "")[1]
        == []
    )


def test_one_call_at_most_ends_the_answer_but_not_a_thought():
    use = ToolUse("auto", WEATHER_TOOLS, one=True)
    for config in (ServeConfig(), ServeConfig(tool_calls="free")):
        params = shaped(use, OPEN, config=config)
        assert params.stop == ()
        text = "hm </tool_call> hm\n</think>\n\n" + CALL
        assert taken(params.constraint.source, text, trained()) == (text, True)
        assert taken(params.constraint.source, text + "\n", trained())[0] == text


def test_text_of_a_tag_is_written_without_its_token():
    compiler = ConstraintCompiler(trained(), trained().get_vocab_size(), (trained().token_to_id("<|im_end|>"),))
    for kind, source, text in (
        ("regex", "a <\\/think> b", "a </think> b"),
        ("lark", 'start: "<tool_call>"', "<tool_call>"),
        ("json_schema", '{"const": "<|im_end|>"}', '"<|im_end|>"'),
    ):
        machine, tokens = compiler.machine(Constraint(kind, source)), []
        while not machine.finished:
            tokens.append(int(machine.allowed().nonzero()[-1]))
            machine.take(tokens[-1])
        written = trained().decode(tokens, skip_special_tokens=False)
        assert written.removesuffix("<|im_end|>" if written != text else "") == text
        assert not {trained().token_to_id(tag) for tag in ("</think>", "<tool_call>")} & set(tokens)
    named = compiler.machine(Constraint("lark", 'start: "<think>" <tool_call> /<tool_call>/'))
    for token in [*trained().encode("<").ids, *trained().encode("think>").ids, trained().token_to_id("<tool_call>")]:
        assert named.allowed()[token]
        named.take(token)


@pytest.mark.parametrize("start", [OPEN, "<|im_start|>assistant\n"])
@pytest.mark.parametrize("mode", ["free", "auto", "required"])
@pytest.mark.parametrize("limit", [0, 3])
def test_reasoning_is_closed_after_its_limit_of_tokens(start, mode, limit):
    use = ToolUse() if mode == "free" else ToolUse(mode, WEATHER_TOOLS)
    source = shaped(use, start, limit=limit).constraint.source
    matcher = LLMatcher(vocabulary(trained()), source)
    close, opening = (trained().token_to_id(tag) for tag in ("</think>", "<think>"))
    if start != OPEN:
        assert matcher.consume_token(opening)
    words = trained().encode("hm, so it is").ids
    assert len(words) > limit
    assert matcher.try_consume_tokens(words) == limit
    assert matcher.consume_token(close)
    answer = CALL if mode == "required" else "\n\nIt is so."
    assert matcher.try_consume_tokens(trained().encode(answer).ids) == len(trained().encode(answer).ids)
    assert matcher.is_accepting()


def test_limit_of_reasoning_changes_nothing_where_there_is_none():
    assert shaped(ToolUse(), CLOSED, limit=3) == PLAIN
    assert shaped(ToolUse(), OPEN) == PLAIN


def test_descriptions_of_250_tools_leave_room_for_their_constraints():
    text = {"type": "string", "title": "t" * 200, "description": "d" * 2_000}
    part = {"properties": {"title": text, "description": {"enum": [{"title": "kept"}]}}, "required": ["title"]}
    tools = {f"f{i}": FunctionDefinition(name=f"f{i}", parameters={"type": "object", **part}) for i in range(250)}
    tools["f7"] = FunctionDefinition(
        name="f7", parameters={"properties": {"p": {"uniqueItems": True, "type": "array"}}}
    )
    dialect = Dialect(TEMPLATE, ServeConfig(), trained())
    held, missing = dialect.enforced(ToolUse("required", tools), "")
    assert missing == ["uniqueItems of tool 'f7'"]
    source = dialect.shaped(PLAIN, Start(CLOSED), held, None).constraint.source
    assert len(source) < 100_000
    assert source.count('"required": ["title"]') == source.count('{"title": "kept"}') == 249
