"""Texts of free-form tools, decoded from pieces of JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.server.answer.responses import FreeFormText
from tests.server.answer.formats.cases import cut, cuts

PATCH = '*** Begin Patch\n*** Add File: é😀.py\n+print("\\u0041")\n*** End Patch\n'


def decoded(pieces):
    decoder = FreeFormText()
    return "".join(decoder.push(piece) for piece in pieces) + decoder.finish()


@given(st.text(st.characters(codec="utf-8")) | st.just(PATCH), st.booleans(), cuts)
def test_text_is_decoded_at_every_cut(text, ascii_only, places):
    assert decoded(cut(json.dumps({"input": text}, ensure_ascii=ascii_only), places)) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (' {\n "input" : "a\nb"\n}', "a\nb"),
        ('{"input": "a", "input": "b"}', "a"),
        ('{"input": "a"} and more', "a"),
        (r'{"input": "\d \u00zz \b"}', "\\d \\u00zz \b"),
        (r'{"input": "\ud83d\u12"}', "\ufffd\\u12"),
        (r'{"input": "\ud83d\ud83d\ude00 \ude00"}', "\ufffd😀 \ufffd"),
        ('{"input": "a', "a"),
        (r'{"input": "a\u00', "a"),
        (r'{"input": "a\ud83d\ude', "a"),
        ('{"input": "a\\', "a"),
        ("{}", ""),
        ("", ""),
        ('{"patch": "x"}', "x"),
        ('{"why": "y", "input": "x"}', "x"),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('{"input": ["ls"]}', '{"input": ["ls"]}'),
        ('{"inp', '{"inp'),
        ("[" * 10_000, "[" * 10_000),
    ],
)
def test_odd_arguments_give_the_same_text_at_every_cut(arguments, text):
    for at in range(min(len(arguments), 60) + 1):
        assert decoded([arguments[:at], arguments[at:]]) == text
    assert decoded(arguments) == text


def test_text_is_passed_on_as_it_comes():
    decoder = FreeFormText()
    pieces = ['{"in', 'put": "a', "b\\", 'n"', "}"]
    assert [decoder.push(piece) for piece in pieces] == ["", "a", "b", "\n", ""]
