"""Token ids, a request a line: {"t", "session", "input": [ids], "output": [ids], "segments": [[start, end], ...]}.

All but the input may be missing; `fidelity` and `exact` are as the server takes them.

A line may also be the input's ids alone. `prompt_token_ids` and `prompt` are other names of the input.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from headwater.traces.reader import Reader, has, seconds
from headwater.traces.request import Request
from headwater.traces.segments import fidelity_of, spans_of
from headwater.traces.shared_text import Prompt, SharedTexts
from headwater.traces.source import Source

INPUTS = ("input", "prompt_token_ids", "prompt")


class TokenLists(Reader):
    interleaved = True

    @staticmethod
    def matches(first: Any) -> bool:
        if isinstance(first, list):
            return all(isinstance(token, int) for token in first)
        return any(has(first, name) and isinstance(first[name], list) for name in INPUTS)

    def requests(self, source: Source) -> Iterator[Request]:
        texts = SharedTexts()
        for number, line in enumerate(source.records()):
            record = {"input": line} if isinstance(line, list) else line
            prompt = array("i", record[next((name for name in INPUTS if name in record), INPUTS[0])])
            if not prompt:
                raise ValueError("input has 0 tokens, at least 1 is needed")
            output = array("i", record.get("output") or ())
            session = str(record.get("session", f"line {number}"))
            known = Prompt(prompt.tobytes(), segments=spans_of(record, len(prompt)), fidelity=fidelity_of(record))
            texts.add(session, known, output.tobytes(), seconds(record))
        yield from texts.requests()
