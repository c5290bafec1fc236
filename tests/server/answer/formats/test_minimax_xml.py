"""Invocations in XML: several between one pair of tags, values without lines around them."""

from __future__ import annotations

import pytest

from tests.server.answer.formats.cases import WRITTEN, parse, shape

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
BONN = '<invoke name="weather">\n<parameter name="city">Bonn</parameter>\n</invoke>\n'
DAYS = '<parameter name="days">3</parameter>'
PING = '<invoke name="ping">\n</invoke>\n'
CALLED, PINGED = ("weather", {"city": "Bonn"}), ("ping", {})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (WRITTEN["minimax_xml"]([CALLED, PINGED]), [CALLED, PINGED]),
        (f"{OPEN}\n{BONN}{CLOSE}\n{OPEN}{PING}{CLOSE}so", [CALLED, PINGED, "c:so"]),
        (f"{OPEN}{BONN.replace('Bonn', chr(10) + 'a b' + chr(10))}{CLOSE}", [("weather", {"city": "\na b\n"})]),
        (f"{OPEN}\n{BONN}{PING}", [CALLED, PINGED]),
        (f"{OPEN}{BONN}nonsense{CLOSE}", [CALLED, f"c:nonsense{CLOSE}"]),
        (f'{OPEN}{BONN}<invoke name="">{CLOSE}', [CALLED, f'c:<invoke name="">{CLOSE}']),
        (f'{OPEN}{BONN}<invoke name="pi', [CALLED, 'c:<invoke name="pi']),
        (f'{OPEN}<invoke name="a\nb">{CLOSE}', [f'c:{OPEN}<invoke name="a\nb">{CLOSE}']),
        (f"{OPEN}<invoke>{CLOSE}", [f"c:{OPEN}<invoke>{CLOSE}"]),
        (f"{OPEN}\n{BONN.replace('Bonn', '</parameter> a')}{CLOSE}", [("weather", {"city": "</parameter> a"})]),
        (f"{OPEN}\n{BONN.replace('</parameter>', '')}{CLOSE}", [CALLED]),
        (
            f"{OPEN}\n{BONN.replace('Bonn</parameter>', 'Bonn' + chr(10) + DAYS)}{CLOSE}",
            [("weather", {"city": "Bonn", "days": 3})],
        ),
        (f"so {BONN}{PING}", ["c:so", CALLED, PINGED]),
    ],
)
def test_calls_are_parsed_and_malformed_ones_stay_content(text, parts):
    assert shape(parse([text], "minimax_xml")) == parts
    assert shape(parse(text, "minimax_xml")) == parts
