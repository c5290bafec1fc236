"""Very many short requests, each with a salt and a seed of its own, over an engine whose model computes nothing."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass, field

import httpx
import torch

from headwater.engine.engine import Engine
from headwater.errors import QueueFull
from headwater.events import Event, FinishedEvent, TokenEvent
from headwater.request import Generation, SamplingParams
from headwater.schedule.step import Step
from stress.visits import request_bytes

PATIENCE = 60  # seconds


class NoModel:
    """In the place of a runner's `run`: random logits, and no arithmetic."""

    def __init__(self, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._logits_RV = torch.randn(64, vocab_size, generator=generator)

    def __call__(self, step: Step) -> torch.Tensor:
        return self._logits_RV[: sum(item.wants_token for item in step.items)].clone()


@dataclass
class Ended:
    """Counts of requests by outcome."""

    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0


@dataclass
class ShortRequests:
    """Sends to one engine, a few at a time; every fifth is cancelled, every third has a deadline."""

    engine: Engine
    at_once: int = 32
    ended: Ended = field(default_factory=Ended)

    def __post_init__(self) -> None:
        self.rng = random.Random(0)
        self.sent = 0
        self._free = threading.Semaphore(self.at_once)
        self.engine.runner.run = NoModel(self.engine.spec.vocab_size)

    def send(self, count: int) -> None:
        """Send this number of requests, and wait for their ends."""
        for _ in range(count):
            assert self._free.acquire(timeout=PATIENCE), "no request ended"
            self._send_one()
        assert self.engine.drain(PATIENCE), "not idle"

    def _send_one(self) -> None:
        rng, number = self.rng, self.sent
        self.sent += 1
        prompt = tuple(rng.randrange(1, 1000) for _ in range(rng.choice([5, 70, 140, 200])))
        params = SamplingParams(max_tokens=rng.randint(1, 4), seed=number, stop=(f"stop {number}",))
        deadline = rng.choice([None, 0.001, 3600.0])
        generation = Generation(prompt, params, f"salt {number}", deadline=deadline)
        cancels = number % 5 == 0
        try:
            request = self.engine.submit(generation, (lambda event: None) if cancels else self._heard)
        except QueueFull:
            self.ended.refused += 1
            self._free.release()
            return
        if cancels:
            self.engine.cancel(request)
            self.ended.cancelled += 1
            self._free.release()

    def _heard(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            return
        if isinstance(event, FinishedEvent):
            self.ended.answered += 1
        else:
            self.ended.failed += 1
        self._free.release()


async def send_over_http(url: str, port: int, count: int, first: int = 0, at_once: int = 16) -> None:
    """Likewise to three endpoints over HTTP: every seventh client hangs up, every second streams."""
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        path, body = _request(number)
        async with gate:
            if number % 7 == 0:
                await _hang_up(port, path, body)
                return
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
                reply = await http.post(path, json=body, headers={"x-request-id": f"id-{number}"})
                assert reply.status_code in (200, 503), reply.text

    await asyncio.gather(*(one(first + i) for i in range(count)))


def _request(number: int) -> tuple[str, dict]:
    said = " ".join(str(number) * 8)[:100]
    path, fields = (
        ("/v1/completions", {"prompt": said, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": said}], "max_tokens": 2}),
        ("/v1/responses", {"input": said, "max_output_tokens": 16}),
    )[number % 3]
    return path, {**fields, "cache_salt": f"http salt {number}", "stream": number % 2 == 0}


async def _hang_up(port: int, path: str, body: dict) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(path, body))
    await writer.drain()
    writer.transport.abort()
