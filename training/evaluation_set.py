"""Writes the held-out set: questions whose answers are known, of the test split, as `headwater eval` reads them."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard
from tokenizers import Tokenizer

from training.tasks import Example, draw
from training.tasks.example import ABSENT, MEMORY, PERSONA, SINGLE, TOOL, TWO_HOP, Message
from training.tasks.recall import SEGMENT
from training.tasks.split import TEST
from training.template import rendered
from training.tokenizer import counter, load

SEED = 7
ITEMS = 200  # of a cell
CELLS = (
    *((SINGLE, tokens) for tokens in (256, 512, 1024, 2048, 4096)),
    *((TWO_HOP, tokens) for tokens in (512, 1024)),
    *((ABSENT, tokens) for tokens in (512, 1024)),
    *((MEMORY, tokens) for tokens in (256, 1024)),
    (PERSONA, 512),
    (TOOL, 512),
)
CHAT_QUESTIONS = 4  # of one chat, from its first to its last
UNASKED_SHARE, MAX_UNASKED = 8, 120  # an example has 1/8 more tokens, at most 120, in questions that are not asked
LEVEL, WINDOW_LOG = 19, 25  # of zstd: the items of a group repeat their documents


@dataclass(frozen=True, slots=True)
class Context:
    """An example as one prompt for each of its questions, asked one by one where there are documents."""

    example: Example

    def prompts(self) -> Iterator[tuple[int, list[Message]]]:
        """Numbers of questions, and the messages up to each."""
        example = self.example
        if not example.documents or example.kind == PERSONA:
            last = len(example.turns) - 1
            for number in sorted({last * place // (CHAT_QUESTIONS - 1) for place in range(CHAT_QUESTIONS)}):
                yield number, example.messages[: example.turns[number]]
            return
        first = example.turns[0] - 1
        before, shown = example.messages[:first], self._shown(example.messages[first]["content"])
        for number, turn in enumerate(example.turns):
            question = example.messages[turn - 1]["content"].removeprefix(shown)
            yield number, [*before, {"role": "user", "content": shown + question}]

    def _shown(self, content: str) -> str:
        """The documents at the beginning of the first message, with what stands around them."""
        last = self.example.documents[-1]
        if last not in content:
            return ""  # they are in the system prompt
        end = content.index(last) + len(last)
        return content[:end] + (SEGMENT if content.startswith(SEGMENT, end) else "")


def items(tokenizer: Tokenizer, per_cell: int = ITEMS, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """`per_cell` items of each cell, in groups that share their documents."""
    rng = random.Random(seed)
    count = counter(tokenizer)
    group = 0
    for kind, tokens in CELLS:
        made = 0
        while made < per_cell:
            example = draw(rng, tokens + min(tokens // UNASKED_SHARE, MAX_UNASKED), TEST, (kind,), count=count)
            for number, messages in list(Context(example).prompts())[: per_cell - made]:
                yield _item(example, number, messages, tokenizer, group)
                made += 1
            group += 1


def _item(example: Example, number: int, messages: list[Message], tokenizer: Tokenizer, group: int) -> dict[str, Any]:
    asked, answers = example.asked[number]
    prompt = rendered(messages, example.tools, generate=True)
    return {
        "kind": asked,
        "n_documents": len(example.documents),
        "tokens": len(tokenizer.encode(prompt, add_special_tokens=False).ids),
        "messages": [_as_sent(message) for message in messages],
        "tools": example.tools,
        "documents": list(example.documents),
        "answers": list(answers),
        "call": _call(example, number) if asked == TOOL else None,
        "group": group,
    }


def _call(example: Example, number: int) -> dict[str, Any]:
    """The right call; its arguments as values."""
    return dict(example.messages[example.turns[number]]["tool_calls"][0]["function"])


def _as_sent(message: Message) -> Message:
    """As OpenAI's API takes it: calls have an id and their arguments as text."""
    if message["role"] == "tool":
        return {**message, "tool_call_id": "call"}
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "id": "call", "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def write(path: Path, tokenizer: Tokenizer, per_cell: int = ITEMS, seed: int = SEED) -> int:
    """The items as JSON lines under zstd; how many there are."""
    lines = [json.dumps(item, ensure_ascii=False) + "\n" for item in items(tokenizer, per_cell, seed)]
    parameters = zstandard.ZstdCompressionParameters.from_level(LEVEL, window_log=WINDOW_LOG)
    path.write_bytes(zstandard.ZstdCompressor(compression_params=parameters).compress("".join(lines).encode()))
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the held-out set.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; without it the embedded model's")
    parser.add_argument("--items", type=int, default=ITEMS, help="of each kind and length")
    options = parser.parse_args()
    number = write(options.out, load(options.tokenizer), options.items)
    print(f"{number:,} items, {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
