"""TraceLab's rounds of coding agents, with the prefix that the provider had cached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater.traces.lengths import BLOCK_TOKENS, InferredTexts
from headwater.traces.reader import Reader, has, instant, whole
from headwater.traces.request import Request, Usage
from headwater.traces.source import Source
from headwater.traces.tokens import Tokens

INPUTS = ("user_message", "tool_result")


class TraceLab(Reader):
    """A round a line: `session_id`, `round_index`, `input_tokens_total`, `prefix_tokens` (cached), `output_tokens`,
    `reasoning_output_tokens`, `timing_events` [{`event_type`, `timestamp`}]. No text.

    Source: github.com/uw-syfi/TraceLab (CC BY 4.0; arXiv 2606.30560), rows in file order.
    Inferred: a round has the prompt before it and its answer if it is long enough, else the prompt only, and if it is
    shorter (a compaction) as much as the provider had cached. Reasoning is not sent again. So the prediction does
    not depend on the measurement, except after a compaction. Sessions share nothing.
    """

    about = "rounds of agents: lengths, cached prefix, times"
    fields = ("session_id", "round_index", "input_tokens_total", "prefix_tokens", "output_tokens", "timing_events")
    block_tokens = BLOCK_TOKENS
    has_token_ids = False
    interleaved = True

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(tokens)
        self._compacted = 0

    @staticmethod
    def matches(first: Any) -> bool:
        return has(first, "session_id", "input_tokens_total", "prefix_tokens")

    def requests(self, source: Source) -> Iterator[Request]:
        texts, before = InferredTexts(), dict[str, Request]()
        for line in source.records():
            session, prompt = str(line["session_id"]), whole(line, "input_tokens_total")
            if not prompt:
                continue
            cached, output = whole(line, "prefix_tokens"), whole(line, "output_tokens")
            visible = max(0, output - int(line.get("reasoning_output_tokens") or 0))
            usage = Usage(prompt, cached, output)
            request = Request(session, b"", prompt, output, prompt + visible, _sent(line), usage=usage)
            texts.add(request, self._shared(before.get(session), prompt, cached))
            before[session] = request
        yield from texts.requests()

    def notes(self) -> tuple[str, ...]:
        return (
            f"no text: blocks of {BLOCK_TOKENS} tokens are inferred from lengths, so sessions share nothing",
            f"{self._compacted:,} rounds are shorter than the one before and share what the provider had cached",
        )

    def _shared(self, last: Request | None, prompt: int, cached: int) -> int:
        if last is None:
            return 0
        if prompt >= last.known_tokens:
            return last.known_tokens
        if prompt >= last.prompt_tokens:
            return last.prompt_tokens
        self._compacted += 1
        return min(cached, prompt)


def _sent(line: dict[str, Any]) -> float | None:
    """Return the time of the last input of a round, or of its first event."""
    events = line.get("timing_events") or ()
    times = [event["timestamp"] for event in events if event["event_type"] in INPUTS] or [
        event["timestamp"] for event in events[:1]
    ]
    return max(map(instant, times)) if times else None
