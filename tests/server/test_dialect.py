"""What sampling is asked to see to, for a tokenizer whose tags are tokens."""

from __future__ import annotations

from functools import cache

from headwater.config import ServeConfig
from headwater.models.tiny import tokenizer as tiny
from headwater.server.dialect import Dialect, Shape
from headwater.server.tools import ToolUse
from headwater.types import SamplingParams
from tests.server import templates
from tests.server.formats.cases import WEATHER_TOOLS
from tests.server.formats.test_grammar import hermes, taken

TEMPLATE = templates.REASONING + '{# <tool_call>{"name": …, "arguments": …} #}'
OPEN, CLOSED = "<|im_start|>assistant\n<think>\n", "<think>\n\n</think>\n\n"
CALL, THOUGHT = hermes("weather", {"city": "Bonn"}), "hm\n</think>\n\n"


@cache
def trained():
    return tiny.train(600, 1)


def shape(end, mode="auto", schema=None):
    return Dialect(TEMPLATE, ServeConfig(), trained()).shape(end, ToolUse(mode, WEATHER_TOOLS), schema)


def test_where_no_call_is_wanted_the_tag_is_banned():
    banned = shape(OPEN, "none")
    assert banned == Shape(banned=(trained().token_to_id("<tool_call>"),))
    params = banned.applied(SamplingParams(logit_bias=((1, 2.0),)))
    assert params.logit_bias == ((1, 2.0), (banned.banned[0], -100.0))


def test_reasoning_ends_with_its_token_and_the_call_begins_with_its_own():
    required = shape(OPEN, "required").constraint.source
    assert taken(required, THOUGHT + CALL, trained()) == (THOUGHT + CALL, True)
    assert taken(required, CALL, trained()) == ("", False)  # within reasoning no tag but the closing one
    assert taken(shape(CLOSED, "required").constraint.source, CALL, trained()) == (CALL, True)


def test_reasoning_may_come_first_where_the_prompt_leaves_it_open_whether_to_think():
    source = shape("<|im_start|>assistant\n", schema={"type": "object"}).constraint.source
    for text in ("{}", CALL, "<think>\n" + THOUGHT + "{}"):
        assert taken(source, text, trained()) == (text, True)
