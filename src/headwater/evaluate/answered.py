"""What a server said to one item, and what that cost it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwater.load import received

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answered:
    item: int  # its place in the file
    column: str  # of the table of ways: how, and the how-many-eth time, it was asked
    outcome: str  # "ok" | "refused" (a 4xx: its context is too long, say) | "error"
    detail: str = ""  # what went wrong
    text: str = ""
    calls: tuple[Json, ...] = ()  # of tools: {"name", "arguments" as text}
    finish_reason: str | None = None
    logprobs: tuple[object, ...] | None = None  # of the answer's tokens; None: not asked for, or not told
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    reason: str | None = None  # Headwater's, for where it resumed

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def said(self) -> tuple[object, ...]:
        """What a client sees of it."""
        return (self.outcome, self.text, tuple((call["name"], call["arguments"]) for call in self.calls))


def answered_of(item: int, column: str, body: Json) -> Answered:
    """Of a chat completion, as far as it has what it should."""
    choice = received.object_of(next(iter(received.list_of(body.get("choices"))), None))
    message, usage = received.object_of(choice.get("message")), received.object_of(body.get("usage"))
    functions = [
        received.object_of(received.object_of(call).get("function"))
        for call in received.list_of(message.get("tool_calls"))
    ]
    told = received.object_of(choice.get("logprobs")).get("content")
    return Answered(
        item,
        column,
        "ok" if choice else "error",
        "" if choice else "the answer has no choices",
        text=received.text_of(message.get("content")),
        calls=tuple(
            {name: received.text_of(function.get(name)) for name in ("name", "arguments")} for function in functions
        ),
        finish_reason=choice.get("finish_reason"),
        logprobs=tuple(received.object_of(entry).get("logprob") for entry in told) if isinstance(told, list) else None,
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=received.object_of(usage.get("prompt_tokens_details")).get("cached_tokens"),
        reason=received.object_of(body.get("headwater")).get("reason"),
    )
