"""Streams of the OpenAI API over a router whose worker is lost: the joined stream is the undisturbed one.

Lost after the first token, in the middle and before the last one: two answers with log probabilities, and a tool call.
"""

import json
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import httpx
import pytest
import torch

from headwater.cli.router_process import app_of
from headwater.cluster.router import Router
from headwater.config import ServeConfig
from tests.checkpoints import TRAINED
from tests.cluster.fake import PATIENCE, kill, until
from tests.cluster.test_routed_answers import RealWorker, cluster
from tests.server.routes.test_serving import Server

TOOL = {"name": "look_up", "parameters": {"type": "object", "properties": {"name": {"type": "string"}}}}
ASKED = {
    "two answers": {"n": 2, "seed": 5, "logprobs": True, "top_logprobs": 2, "max_tokens": 40, "ignore_eos": True},
    "a tool call": {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", "seed": 3},
}
AFTER = {"the first": lambda tokens: 1, "half": lambda tokens: tokens // 2, "all but one": lambda tokens: tokens - 1}


@dataclass
class Joined:
    """One choice of a stream, put together."""

    text: str = ""
    call: str = ""  # the names and arguments of tool calls
    logprobs: list[dict] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


def stream(url: str, asked: dict) -> tuple[dict[int, Joined], int]:
    """Return the choices of a streamed answer, and the tokens of the longest one."""
    body = {
        "messages": [{"role": "user", "content": "Who keeps the list of ships?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 60,
        "speculation": {"drafter": "off"},  # a step is a token
        **asked,
    }
    choices, tokens = defaultdict[int, Joined](Joined), 0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            part = json.loads(line[6:])
            assert "error" not in part, part
            tokens = (part.get("usage") or {}).get("completion_tokens", tokens)
            for choice in part["choices"]:
                one, delta = choices[choice["index"]], choice["delta"]
                one.text += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    one.call += call["function"].get("name") or ""
                    one.call += call["function"].get("arguments") or ""
                one.logprobs += (choice.get("logprobs") or {}).get("content") or []
                one.ends += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return dict(choices), tokens // asked.get("n", 1)


@contextmanager
def served(router: Router) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as sock, Server(app_of(router, ServeConfig()), sock):
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


def lose_after(tokens: int, router: Router, workers: dict[str, RealWorker]) -> threading.Thread:
    """Kill the worker of an answer once its router has `tokens` tokens of it; steps after them wait for that."""
    lost = threading.Event()
    for worker in workers.values():
        assert worker.engine.drain(60)  # steps are those of the answer

    def hold(worker: RealWorker) -> None:
        run, steps = worker.engine.runner.run, count()

        def held(step) -> torch.Tensor:
            if next(steps) >= tokens:
                assert lost.wait(60)
            return run(step)

        worker.engine.runner.run = held

    def lose() -> None:
        until(lambda: any(len(one.sent) >= tokens for one in tuple(router._requests.values())))
        name = next(one.link.name for one in tuple(router._requests.values()) if len(one.sent) >= tokens)
        kill(router, name, workers[name])
        lost.set()

    for worker in workers.values():
        hold(worker)
    thread = threading.Thread(target=lose, daemon=True)
    thread.start()
    return thread


def cells() -> Iterator[object]:
    for kind in ASKED:
        for after in AFTER:
            marks = [] if (kind, after) == ("a tool call", "half") else [pytest.mark.full]
            yield pytest.param(kind, after, id=f"{kind}, {after}", marks=marks)


@pytest.mark.parametrize(("kind", "after"), cells())
def test_a_stream_whose_worker_is_lost_is_the_undisturbed_one(load, kind: str, after: str) -> None:
    model = load(TRAINED, "float32", 2)
    with cluster(model, a="one", b="one") as (router, workers), served(router) as url:
        whole, tokens = stream(url, ASKED[kind])
        assert tokens > 10
        assert all(one.call if kind == "a tool call" else len(one.logprobs) == tokens for one in whole.values())
        thread = lose_after(AFTER[after](tokens), router, workers)
        joined, _ = stream(url, ASKED[kind])
        thread.join(PATIENCE)
        assert router.counts["resumed"] >= 1, router.counts
        assert len(router.links) == 1
    assert len(whole) == ASKED[kind].get("n", 1)
    assert joined == whole
