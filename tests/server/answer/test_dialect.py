"""Sampling for tools and schemas, with a tokenizer whose tags are tokens."""

from __future__ import annotations

from functools import cache

from headwater.config import ServeConfig
from headwater.request import SamplingParams
from headwater.server.answer.dialect import Dialect
from headwater.server.requests.tools import ToolUse
from tests.checkpoints.tokenizer import train
from tests.server import templates
from tests.server.answer.formats.cases import WEATHER_TOOLS, WRITTEN
from tests.server.answer.formats.test_grammar import hermes, taken

TEMPLATE = templates.REASONING + '{# <tool_call>{"name": …, "arguments": …} #}'
OPEN, CLOSED = "<|im_start|>assistant\n<think>\n", "<think>\n\n</think>\n\n"
PLAIN = SamplingParams()
CALL, THOUGHT = hermes("weather", {"city": "Bonn"}), "hm\n</think>\n\n"


@cache
def trained():
    return train(600, 1)


def shape(end, mode="auto", schema=None):
    return Dialect(TEMPLATE, ServeConfig(), trained()).shaped(PLAIN, end, ToolUse(mode, WEATHER_TOOLS), schema)


def test_where_no_call_is_wanted_the_tag_is_banned():
    banned = (trained().token_to_id("<tool_call>"), -100.0)
    assert shape(OPEN, "none") == SamplingParams(logit_bias=(banned,))
    dialect, use = Dialect(TEMPLATE, ServeConfig(), trained()), ToolUse("none", WEATHER_TOOLS)
    params = dialect.shaped(SamplingParams(logit_bias=((1, 2.0),)), OPEN, use, None)
    assert params == SamplingParams(logit_bias=((1, 2.0), banned))


def test_reasoning_ends_with_its_token_and_the_call_begins_with_its_own():
    required = shape(OPEN, "required").constraint.source
    assert taken(required, THOUGHT + CALL, trained()) == (THOUGHT + CALL, True)
    assert taken(required, CALL, trained()) == ("", False)  # within reasoning no tag but the closing one
    assert taken(shape(CLOSED, "required").constraint.source, CALL, trained()) == (CALL, True)


def test_reasoning_may_come_first_where_the_prompt_leaves_it_open_whether_to_think():
    source = shape("<|im_start|>assistant\n", schema={"type": "object"}).constraint.source
    for text in ("{}", CALL, "<think>\n" + THOUGHT + "{}"):
        assert taken(source, text, trained()) == (text, True)


def test_tags_that_are_special_tokens_are_shown_to_the_parser_that_looks_for_them():
    tokenizer = trained().from_str(trained().to_str())
    tokenizer.add_special_tokens(["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<think>"])
    kimi = Dialect(templates.REASONING + "{# <|tool_calls_section_begin|> #}", ServeConfig(), tokenizer)

    def shown(mode):
        params = kimi.shaped(PLAIN, OPEN, ToolUse(mode, WEATHER_TOOLS), None)
        return {tokenizer.id_to_token(token) for token in params.shown_tokens}

    assert shown("auto") == {"<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<think>"}
    assert shown("none") == {"<think>"}
    assert shape(OPEN).shown_tokens == ()


def test_one_call_of_a_format_whose_tags_hold_several_is_seen_to_by_a_grammar():
    listed = Dialect("<TOOLCALL>", ServeConfig(), trained())
    source = listed.shaped(PLAIN, "", ToolUse("auto", WEATHER_TOOLS, one=True), None).constraint.source
    one, two = (WRITTEN["nemotron"]([("ping", {})] * count) for count in (1, 2))
    assert taken(source, "so " + one, trained()) == ("so " + one, True)
    assert not taken(source, "so " + two, trained())[1]
    assert listed.shaped(PLAIN, "", ToolUse("auto", WEATHER_TOOLS), None) == PLAIN
