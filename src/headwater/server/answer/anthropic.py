"""Reply of Anthropic's Messages API: a message of blocks, whole or as a stream of typed events."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from headwater.account import CacheAccount, Reason
from headwater.events import FinishedEvent
from headwater.server.answer.formats.parser import CallBegin, Content, Delta, Reasoning, joined
from headwater.server.answer.forms import Json, Parser, deltas_of, new_call_id
from headwater.server.answer.reply import comment, one_line
from headwater.server.http.error_forms import anthropic_form
from headwater.server.http.errors import error_body
from headwater.server.http.exchange import EVENTS_TYPE, Events, Prefilled
from headwater.server.http.middleware import current_request_id
from headwater.server.requests.anthropic import MessagesRequest
from headwater.server.requests.normal_form import mapping

SIGNATURE = "unsigned"  # of reasoning: clients send back blocks with a signature only, and nothing verifies it


class MessagesReply:
    """Answer to one request, from the events of its only generation."""

    media_type = EVENTS_TYPE

    def __init__(self, body: MessagesRequest, model: str, parser: Parser, prompt: int, grid: int) -> None:
        """`prompt`: tokens of the prompt; `grid`: tokens whose multiples are the positions at which it can resume."""
        self._body, self._parser, self._grid = body, parser, grid
        self._blocks = Blocks()
        start = {"input_tokens": prompt, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        self._message: Json = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._message |= {"content": [], "stop_reason": None, "stop_sequence": None}
        self._message["usage"] = {**start, "output_tokens": 0, "service_tier": "standard"}

    async def whole(self, events: Events) -> Json:
        """Return the message when the generation has ended; raises its error if it failed."""
        deltas: list[Delta] = []
        async for _, event in events:
            deltas += self._shown(event)
        assert isinstance(event, FinishedEvent)
        for _ in (*self._blocks.take(joined(deltas)), *self._blocks.end()):
            pass  # only a stream sends the events of the blocks
        usage = {**self._message["usage"], **self._usage(event)}
        content = {"content": self._blocks.content}
        return {**self._message, **content, **self._stop(event), "usage": usage, "headwater": self._account(event)}

    async def stream(self, events: Events, include_usage: bool) -> AsyncIterator[str]:
        """Yield server-sent events; a failure midway ends them with an error event. Usage is always included."""
        try:
            yield sse({"type": "message_start", "message": self._message})
            yield PING
            async for _, event in events:
                for block_event in self._blocks.take(joined(self._shown(event))):
                    yield sse(block_event)
            assert isinstance(event, FinishedEvent)
            for block_event in self._blocks.end():
                yield sse(block_event)
            ended = {"delta": self._stop(event), "usage": self._usage(event), "headwater": self._account(event)}
            yield sse({"type": "message_delta", **ended})
            yield sse({"type": "message_stop"})
        except Exception as error:  # the status was sent already, so the error can only be sent as an event
            status, body = error_body(error)
            yield sse(anthropic_form(status, body["error"], current_request_id()))

    def keep_alive(self, progress: Prefilled) -> str:
        """Return a text for a waiting client: a ping, after a comment with the progress if that is given."""
        return PING if progress is None else comment(progress) + PING

    def _shown(self, event: object) -> list[Delta]:
        """Return the deltas of an event's text; reasoning only if it was requested."""
        deltas = deltas_of(self._parser, event)
        if self._body.max_tokens == 0:
            return []
        return deltas if self._body.thinks else [delta for delta in deltas if not isinstance(delta, Reasoning)]

    def _stop(self, end: FinishedEvent) -> Json:
        """Return why the answer ended."""
        if end.finish_reason == "length":
            cut = end.output_tokens < self._body.max_tokens
            return {"stop_reason": "model_context_window_exceeded" if cut else "max_tokens", "stop_sequence": None}
        if isinstance(end.stop, str) and end.stop in (self._body.stop or ()):
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
        return {"stop_reason": "tool_use" if self._blocks.calls else "end_turn", "stop_sequence": None}

    def _usage(self, end: FinishedEvent) -> Json:
        output = min(end.output_tokens, self._body.max_tokens)
        return {**input_usage(end.account, self._grid), "output_tokens": output}

    def _account(self, end: FinishedEvent) -> Json:
        return {**end.account.as_dict(), "warnings": self._body.warnings}


def input_usage(account: CacheAccount, grid: int) -> Json:
    """Return a prompt's tokens in three parts, as Anthropic counts them.

    They are tokens that were read from the cache, tokens that were computed and that the same prompt would read next
    time, and the rest, which is always computed: none if prompts resume at any token, else those after the last page.
    """
    at_any_token = grid == 1
    kept = account.prompt_tokens if at_any_token else (account.prompt_tokens - 1) // grid * grid
    kept = 0 if account.reason is Reason.CACHE_OFF else kept
    read, created = account.cached_tokens, max(0, kept - account.cached_tokens)
    return {
        "input_tokens": account.prompt_tokens - read - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": read,
    }


def sse(event: Json) -> str:
    return f"event: {event['type']}\ndata: {one_line(event)}\n\n"


PING = sse({"type": "ping"})


class Blocks:
    """Blocks of a message in the order in which the model writes them. At most the last one is open."""

    def __init__(self) -> None:
        self.content: list[Json] = []
        self.calls = 0
        self._open: TextBlock | None = None

    def take(self, deltas: Iterable[Delta]) -> Iterator[Json]:
        """Add deltas to the blocks, and yield the events of that."""
        for delta in deltas:
            if isinstance(delta, CallBegin):
                self.calls += 1
                yield from self._begin(CallBlock(delta.id or new_call_id("toolu_"), delta.name))
                continue
            kind = BLOCKS.get(type(delta))
            if kind is not None and type(self._open) is not kind:
                yield from self._begin(kind())
            assert self._open is not None
            yield self._placed("content_block_delta", delta=self._open.add(delta.text))

    def end(self) -> Iterator[Json]:
        """Close the last block."""
        if self._open is None:
            return
        for delta in self._open.last():
            yield self._placed("content_block_delta", delta=delta)
        yield self._placed("content_block_stop")
        self.content.append(self._open.shown())
        self._open = None

    def _begin(self, block: TextBlock) -> Iterator[Json]:
        yield from self.end()
        self._open = block
        yield self._placed("content_block_start", content_block=block.shown())

    def _placed(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "index": len(self.content), **fields}


class TextBlock:
    """Text of the answer, and the base of the other blocks."""

    def __init__(self) -> None:
        self.text = ""

    def shown(self) -> Json:
        """Return the block as it is so far."""
        return {"type": "text", "text": self.text}

    def add(self, text: str) -> Json:
        """Append text, and return the delta of that."""
        self.text += text
        return {"type": "text_delta", "text": text}

    def last(self) -> list[Json]:
        """Return the deltas before the block's end."""
        return []


class ThinkingBlock(TextBlock):
    """Reasoning, which is not signed."""

    def shown(self) -> Json:
        return {"type": "thinking", "thinking": self.text, "signature": SIGNATURE if self.text else ""}

    def add(self, text: str) -> Json:
        self.text += text
        return {"type": "thinking_delta", "thinking": text}

    def last(self) -> list[Json]:
        return [{"type": "signature_delta", "signature": SIGNATURE}]


class CallBlock(TextBlock):
    """Call of a tool."""

    def __init__(self, id: str, name: str) -> None:
        super().__init__()
        self._named = {"id": id, "name": name}

    def shown(self) -> Json:
        return {"type": "tool_use", **self._named, "input": mapping(self.text)}

    def add(self, text: str) -> Json:
        self.text += text
        return {"type": "input_json_delta", "partial_json": text}


BLOCKS: dict[type[Delta], type[TextBlock]] = {Reasoning: ThinkingBlock, Content: TextBlock}
