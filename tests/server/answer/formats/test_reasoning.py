"""Reasoning is split from content by its tags, wherever the prompt ends."""

import pytest

from headwater.server.answer.formats import REASONING
from headwater.server.answer.formats.parser import AnswerParser, Content, Reasoning
from tests.server.answer.formats.cases import parse


@pytest.mark.parametrize(
    ("text", "thinking", "deltas"),
    [
        ("Hm.\n</think>\n\nYes.", True, [Reasoning("Hm."), Content("Yes.")]),
        ("\nHm.\n\nSo.\n</think>Yes.\n", True, [Reasoning("Hm.\n\nSo."), Content("Yes.\n")]),
        ("<think>\nHm.\n</think>\n\nYes.", True, [Reasoning("Hm."), Content("Yes.")]),
        ("<think>\nHm.\n</think>\n\nYes.", False, [Reasoning("Hm."), Content("Yes.")]),
        ("\n <think>Hm.</think>", False, [Reasoning("Hm.")]),
        ("Yes.", False, [Content("Yes.")]),
        ("  Yes <think>no</think>", False, [Content("  Yes <think>no</think>")]),
        ("Hm. And then", True, [Reasoning("Hm. And then")]),
        ("Hm.\n</thi", True, [Reasoning("Hm.\n</thi")]),
        ("<thi", False, [Content("<thi")]),
        ("<think>", False, []),
        ("\n\n</think>\n\nYes.", True, [Content("Yes.")]),
        ("", True, []),
    ],
)
def test_reasoning_is_split_off(text, thinking, deltas):
    assert parse([text], None, thinking) == deltas
    assert parse(text, None, thinking) == deltas


def test_reasoning_streams_as_it_comes():
    parser = AnswerParser(REASONING["think"], True)
    assert parser.push("Let me ") == [Reasoning("Let me ")]
    assert parser.push("see.\n") == [Reasoning("see.")]
    assert parser.push("\nSo") == [Reasoning("\n\nSo")]


def test_prompts_tell_whether_they_end_in_reasoning():
    assert REASONING["think"].left_open_by("<|im_start|>assistant\n<think>\n")
    assert not REASONING["think"].left_open_by("<|im_start|>assistant\n")
    assert REASONING["think"].closed_by("<think>\n\n</think>\n\n")
    assert not REASONING["think"].closed_by("<|im_start|>assistant\n<think>\n")


def test_without_a_format_all_is_content():
    assert parse(["<think>a</think>b"], None, True, reasoning=None) == [Content("<think>a</think>b")]
