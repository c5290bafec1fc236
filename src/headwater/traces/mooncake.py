"""Mooncake's traces (FAST '25): a request a line, in hashed blocks of 512 tokens.

`timestamp` (ms), `input_length`, `output_length`, `hash_ids`: equal ids are equal blocks at equal prefixes. The last
block of a prompt may be partial: its id is left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from headwater.traces.reader import Reader, has, seconds, whole
from headwater.traces.request import Request
from headwater.traces.source import Source

BLOCK = 512


class Mooncake(Reader):
    block_tokens = BLOCK

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "input_length", "hash_ids")

    def requests(self, source: Source) -> Iterator[Request]:
        for number, line in enumerate(source.records()):
            length, ids = whole(line, "input_length"), line["hash_ids"]
            if len(ids) < length // BLOCK:
                raise ValueError(f"hash_ids has {len(ids):,} blocks, input_length is {length:,}: {length // BLOCK:,}")
            text = array("q", ids[: length // BLOCK]).tobytes()
            yield Request(str(number), text, length, whole(line, "output_length"), length, seconds(line))

    def notes(self) -> tuple[str, ...]:
        return (
            "no sessions: what was generated is not known, so it is not cached",
            f"blocks of {BLOCK} tokens: only full ones count",
        )
