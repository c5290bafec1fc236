"""Answers that are parsed: a model's reasoning and tool calls, another server's events, tokens into text.

However they are cut, what comes out is the same, and nothing raises.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from headwater.engine.detokenizer import TextStream
from headwater.load.answer import Answer, EventParser
from headwater.models.files import embedded
from headwater.request import SamplingParams
from headwater.server.answer.formats import REASONING, TOOLS
from headwater.server.answer.formats.parser import AnswerParser, Delta, joined
from headwater.server.requests.tools import FunctionDefinition
from stress.fuzz.target import Drawn, Target, pieces

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "any": {}}}
GIVEN = {
    "weather": FunctionDefinition(name="weather", parameters=SCHEMA),
    "ping": FunctionDefinition(name="ping"),
}
FORMATS = (None, *TOOLS.values())
MARKUP = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=weather>", "</function>", "<parameter=city>\n",
    "<parameter=days>", "</parameter>", '{"name": "weather", "arguments": ', '{"city": "Bonn"}', "}", "{", "\\u00",
)  # fmt: skip


def formats(data: bytes) -> None:
    drawn = Drawn(data)
    thinking, tool_format, cuts = bool(drawn.below(2)), drawn.choice(FORMATS), drawn.some_bytes(8)
    text = drawn.rest.decode("utf-8", "replace")

    def parse(parts: list[str]) -> list[Delta]:
        parser = AnswerParser(REASONING["think"], thinking, tool_format, GIVEN)
        return joined([delta for part in parts for delta in parser.push(part)] + parser.finish())

    whole = parse([text])
    assert parse(pieces(cuts, text)) == whole
    assert parse(list(text)) == whole


ODD: tuple[Any, ...] = (None, 5, "x", [], {}, [5], [None], [{}], {"message": 5}, [{"delta": 5}], [{"delta": {}}])
ODD_DELTAS = (
    {"content": 5},
    {"tool_calls": 5},
    {"tool_calls": [5]},
    {"tool_calls": [{"function": 5}]},
    {"content": "x"},
)


def odd_event(drawn: Drawn) -> bytes:
    """JSON with the fields of a chunk, and what no server should send in them."""
    event = {name: drawn.choice(ODD) for name in ("choices", "usage", "error", "headwater") if drawn.below(2)}
    if drawn.below(3) == 0:
        event["choices"] = [{"delta": drawn.choice(ODD_DELTAS), "finish_reason": drawn.choice(ODD)}]
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def events(data: bytes) -> None:
    drawn = Drawn(data)
    odd = odd_event(drawn) if drawn.below(2) else b""
    cuts, stream = drawn.some_bytes(8), odd + drawn.rest
    whole = EventParser().feed(stream)
    parser = EventParser()
    assert [event for part in pieces(cuts, stream) for event in parser.feed(part)] == whole
    answer = Answer()
    for part in pieces(cuts, stream):
        answer.feed(part, 0.0)
    assert isinstance(answer.text, str)
    assert answer.fault is None or isinstance(answer.fault, str)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(embedded() / "tokenizer.json"))


def texts(data: bytes) -> None:
    """Any tokens: joined, the stream is the whole's decoding, cut before the first stop string that is complete."""
    drawn = Drawn(data)
    stop = tuple(drawn.text(4) for _ in range(drawn.below(3)))
    tokens = [drawn.below(tokenizer().get_vocab_size()) for _ in range(len(drawn.rest) // 2)]
    stream, shown, hit = TextStream(tokenizer(), [], SamplingParams(stop=stop)), "", None
    for token in tokens:
        text, hit = stream.push(token)
        shown += text
        if hit is not None:
            break
    shown += "" if hit is not None else stream.flush()
    whole = tokenizer().decode(tokens, skip_special_tokens=True)
    assert whole.startswith(shown) if hit is not None or stop else shown == whole, (whole, shown, hit)
    assert not any(s and s in shown for s in stop)


CHUNK = {
    "choices": [{"index": 0, "delta": {"content": "hi", "tool_calls": [{"function": {"name": "f"}}]}}],
    "usage": {},
}
FORMATS_TARGET = Target(
    formats,
    [
        b"\x01\x01\x02\x05\x09" + "".join(MARKUP[:2] + MARKUP[4:9] + MARKUP[3:4]).encode(),
        b"\x00\x02\x00<tool_call>\n" + b'{"name": "weather", "arguments": {"city": "Bonn", "days": 3}}\n</tool_call>',
        b"\x00\x01\x00<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>",
    ],
    words=[word.encode() for word in MARKUP],
)
EVENTS = Target(
    events,
    [
        b"\x00\x03\x01\x08\x20data: " + json.dumps(CHUNK).encode() + b"\n\ndata: [DONE]\n\n",
        b"\x00\x00data: " + json.dumps({"error": {"message": "no"}}).encode() + b"\r\n\r\n: a comment\r\rdata:\n\n",
        b"\x01\x01\x02\x01\x02\x01\x02\x01\x02\x01\x00event: x\ndata: {\ndata: }\n\n",
    ],
    words=[b"data: ", b"\r\n", b"\n\n", b'"choices": ', b'"delta": ', b'"usage": ', b'"error": ', b"null", b"[]"],
)
TEXTS = Target(
    texts, [b"\x00" + bytes(range(200)), b"\x02\x01a\x02ab" + bytes(range(100)), b"\x01\x04\xf0\x9f\x99\x82" * 9]
)
