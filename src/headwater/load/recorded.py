"""Recorded traffic, read from files with one request or session a line.

Forms of a line:

- `messages` and `calls` [n, ...]: a session. Call i asked for messages[:n_i] and was answered by messages[n_i], at
  seconds `t`[i] after `t0`. `branches` [{`at`, `messages`, `reply`}] are requests that fork off messages[:at].
- `messages` that end with an assistant's: a chat. Each assistant's message answers what comes before it.
- Other `messages`, or `prompt`: an OpenAI request; also inside `body`, as in OpenAI's batches.
- A list of integers, or `prompt_token_ids`: a prompt of token ids.
- `hash_ids`, `input_length`, `output_length`: a request in hashed blocks of 512 tokens (Mooncake's traces). Its tokens
  are drawn, the same for the same id.

Single requests take their time from `t` or `time` (seconds) or `timestamp` (milliseconds). A .csv has the columns
TIMESTAMP, ContextTokens, GeneratedTokens (Azure): prompts of that length are drawn. Any file may be .gz or .zst.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from headwater.errors import ConfigError
from headwater.load.session import Message, Session, Turn
from headwater.traces.reader import calls_of
from headwater.traces.source import open_bytes

Json = dict[str, Any]
BLOCK_TOKENS = 512  # of a hashed block
NOT_SENT = (
    "model", "stream", "stream_options", "messages", "prompt", "prompt_token_ids", "max_tokens",
    "max_completion_tokens", "t", "time", "timestamp", "custom_id", "n",
)  # fmt: skip


def read_sessions(path: Path, vocab: int | None = None) -> Iterator[Session]:
    """Read all sessions of a file. `vocab`: token ids are drawn below it if the file has lengths only.

    Raises ConfigError, with file and line, for a malformed line.
    """
    if ".csv" in path.suffixes:
        yield from _from_csv(path, vocab)
        return
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield from _from_line(json.loads(line), f"{path.name}:{number}", vocab)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise ConfigError(f"{path}:{number}: no known form of a request: {error}") from error


def _opened(path: Path) -> TextIO:
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8", errors="replace")


def _from_line(line: Any, name: str, vocab: int | None) -> Iterator[Session]:
    if isinstance(line, list):
        line = {"prompt": line}
    if not isinstance(line, dict):
        raise ValueError(f"the line is {str(line)[:40]!r}, must be an object or a list of token ids")
    at = _time(line)
    if isinstance(line.get("body"), dict):
        line = line["body"]
    if "calls" in line:
        yield from _from_calls(line, name)
    elif "hash_ids" in line:
        tokens = _tokens_of_blocks(line["hash_ids"], int(line["input_length"]), _needed(vocab))
        yield Session(name, (Turn(prompt=tokens, at=at, output_tokens=int(line["output_length"])),))
    elif "messages" in line and line["messages"][-1]["role"] == "assistant":
        replies = [i for i, message in enumerate(line["messages"]) if message["role"] == "assistant"]
        yield Session(name, _turns(line["messages"], replies, [at] * len(replies), _fields(line)))
    else:
        yield Session(name, (_request(line, at),))


def _request(line: Json, at: float | None) -> Turn:
    wanted = line.get("max_completion_tokens") or line.get("max_tokens")
    if "messages" in line:
        return Turn(tuple(line["messages"]), at=at, output_tokens=wanted, fields=_fields(line))
    prompt = line["prompt_token_ids"] if "prompt_token_ids" in line else line["prompt"]
    if not isinstance(prompt, str):
        prompt = tuple(int(token) for token in prompt)
    if not prompt:
        raise ValueError("the prompt is empty")
    return Turn(prompt=prompt, at=at, output_tokens=wanted, fields=_fields(line))


def _from_calls(line: Json, name: str) -> Iterator[Session]:
    """Yield the session, and one of a single turn for each branch that forks off it."""
    messages, calls = line["messages"], calls_of(line)
    start = float(line.get("t0") or 0)
    times = [start + t for t in line["t"]] if line.get("t") else [None] * len(calls)
    name = str(line.get("session", name))
    if calls:
        yield Session(name, _turns(messages, calls, times, {}))
    for number, branch in enumerate(line.get("branches") or ()):
        prompt = (*messages[: branch["at"]], *branch["messages"])
        yield Session(f"{name}/{number}", (Turn(tuple(map(_message, prompt)), reply=branch["reply"]),))


def _turns(messages: list[Message], replies: list[int], times: list[float | None], fields: Json) -> tuple[Turn, ...]:
    """Return a turn for each index of a reply, with the messages since the reply before."""
    turns, begin = [], 0
    for end, at in zip(replies, times, strict=True):
        new = tuple(_message(message) for message in messages[begin:end])
        turns.append(Turn(new, reply=messages[end].get("content") or "", at=at, fields=fields))
        begin = end + 1
    return tuple(turns)


def _message(message: Message) -> Message:
    return {name: value for name, value in message.items() if value is not None}


def _fields(line: Json) -> Json:
    return {name: value for name, value in line.items() if name not in NOT_SENT}


def _time(line: Json) -> float | None:
    if isinstance(line.get("timestamp"), int | float):
        return float(line["timestamp"]) / 1000
    at = line.get("t", line.get("time"))
    return float(at) if isinstance(at, int | float) else None


def _tokens_of_blocks(ids: list[int], length: int, vocab: int) -> tuple[int, ...]:
    tokens: list[int] = []
    for block in ids:
        tokens += random.Random(block).choices(range(vocab), k=min(BLOCK_TOKENS, length - len(tokens)))
    return tuple(tokens)


def _from_csv(path: Path, vocab: int | None) -> Iterator[Session]:
    ids = range(_needed(vocab))
    with _opened(path) as file:
        for number, row in enumerate(csv.DictReader(file)):
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                n_in, n_out = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}, row {number}: no known form of a request: {error}") from error
            prompt = tuple(random.Random(number).choices(ids, k=max(1, n_in)))
            turn = Turn(prompt=prompt, at=at, output_tokens=max(1, n_out))
            yield Session(f"{path.name}:{number}", (turn,))


def _needed(vocab: int | None) -> int:
    if vocab is None:
        raise ValueError("the file has no text, so its tokens are drawn: give the number of token ids with --vocab")
    return vocab
