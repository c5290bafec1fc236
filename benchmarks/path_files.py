"""Files of the package that a warm chat turn, a decode step and an eviction enter: the hops of a reader.

    python -m benchmarks.path_files [--list]

A file counts if a function that is defined in it is called or resumed: also a property, a generator, a nested function.
Modules and class bodies that an import executes do not count, nor do `__init__` methods that dataclasses write, kernels
that numba or Triton has compiled, and files of other packages. headwater-tiny is served over HTTP on loopback.

Warm chat turn: from the second request of a conversation until its streamed answer has ended, in all threads.
Decode step: from the event of one token of an answer until that of the next one, on the engine's thread.
Eviction: `reserve` of a prompt by a full cache with the default policy. All settings are the defaults.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

import headwater
from benchmarks import measure
from benchmarks.servers import JSON, ServerThread
from headwater.cache.prefix_cache import PrefixCache
from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.events import Event, TokenEvent
from headwater.models.files import embedded
from headwater.plan import CacheLayout, Draft, Saving
from headwater.request import Generation, SamplingParams
from headwater.schedule.sequence import key_of
from headwater.table import Table

PACKAGE = f"{Path(headwater.__file__).parent}/"
GOALS = {"warm chat turn": 45, "decode step": 22, "eviction": 9}  # files
MEMORY = 10**8  # bytes
TRACED_TOKEN = 4  # of an answer: the step after it is traced
ANSWER_TOKENS = TRACED_TOKEN + 4
SYSTEM = "You answer questions about the sea in one short sentence. " * 12
QUESTIONS = "Which ocean is the largest one?", "And which one is the coldest?"


class FileCounter:
    """Profiler of this thread and of those that start after it; collects the files entered while `files` is a set."""

    def __init__(self) -> None:
        self.files: set[str] | None = None
        self.thread: int | None = None  # the only thread that counts; None: all
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        files, code = self.files, frame.f_code
        if files is None or event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_flags & CO_OPTIMIZED and self.thread in (None, threading.get_ident()):
            files.add(code.co_filename.removeprefix(PACKAGE))

    @contextmanager
    def counting(self) -> Iterator[set[str]]:
        """Collect files in all threads while the block runs."""
        self.files = files = set[str]()
        try:
            yield files
        finally:
            self.files = None


def warm_chat_turn(counter: FileCounter, engine: Engine, config: ServeConfig) -> set[str]:
    """Return the files of the second turn of a conversation."""
    messages = [{"role": "system", "content": SYSTEM}]
    with ServerThread(engine, config) as server:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            engine.drain()
            with counter.counting() as files:
                answer, cached = chat(server.port, messages)
                engine.drain()
            messages.append({"role": "assistant", "content": answer})
    if not cached:
        raise RuntimeError("the second turn of the conversation was not a hit")
    return files


def chat(port: int, messages: list[dict[str, str]]) -> tuple[str, int]:
    """Ask for a streamed answer; return its text and the cached tokens of its prompt."""
    body = {"model": "m", "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
    lines = connection.getresponse().read().decode().splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    connection.close()
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    return text, next(chunk["headwater"]["cached_tokens"] for chunk in chunks if chunk.get("headwater"))


def decode_step(counter: FileCounter, engine: Engine) -> set[str]:
    """Return the files of the step between two tokens of an answer."""
    files, ended, tokens = set[str](), threading.Event(), Counter[str]()

    def on_event(event: Event) -> None:
        if not isinstance(event, TokenEvent):
            ended.set()
            return
        tokens["seen"] += 1
        if tokens["seen"] == TRACED_TOKEN:
            counter.files, counter.thread = files, threading.get_ident()
        elif tokens["seen"] == TRACED_TOKEN + 1:
            counter.files = counter.thread = None

    prompt = tuple(engine.tokenizer.encode(SYSTEM).ids)
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
    engine.submit(Generation(prompt, params), on_event)
    ended.wait()
    return files


def eviction(counter: FileCounter, policy: str) -> set[str]:
    """Return the files of a `reserve` by a full cache, which evicts another prompt."""
    cache = PrefixCache(CacheLayout(n_pages=32, page_size=4, unit_tokens=4, unit_bytes=16), policy)
    for request in range(1, 6):
        key = key_of(list(range(100 * request, 100 * request + 48)))
        match = cache.match(key, 49)
        draft = Draft(request, "", key, match.checkpoint_tokens, 48, 48, Saving((48,)))
        with counter.counting() as files:
            plan = cache.reserve(draft, match)
        cache.commit(plan)
        cache.release(request)
    if not cache.stats().evicted_checkpoints:
        raise RuntimeError("nothing was evicted from the full cache")
    return files


def measured() -> dict[str, set[str]]:
    """Return the files of each path in GOALS."""
    counter, config = FileCounter(), ServeConfig(model=embedded(), memory=MEMORY)
    engine = Engine.load(config)
    engine.start()
    decoding, chat_turn = decode_step(counter, engine), warm_chat_turn(counter, engine, config)
    engine.stop()
    return dict(zip(GOALS, (chat_turn, decoding, eviction(counter, config.eviction)), strict=True))


def rooms_of(files: set[str]) -> str:
    """Return the number of files in each folder of the package, most first."""
    rooms = Counter(file.partition("/")[0] if "/" in file else "package" for file in files)
    return ", ".join(f"{room} {count}" for room, count in rooms.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the files")
    given = parser.parse_args()
    found = measured()
    table = Table(None, ("path",), ("files", "goal"), ("rooms",))
    for name, files in found.items():
        table.add_row(name, str(len(files)), f"<= {GOALS[name]}", rooms_of(files))
    measure.console().print(table)
    if given.list:
        for name, files in found.items():
            print(f"\n{name}", *sorted(files), sep="\n  ")


if __name__ == "__main__":
    main()
