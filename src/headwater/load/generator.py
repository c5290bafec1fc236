"""The load generator: sends sessions, at given times or from a number of clients, and measures each request.

In an open loop a request is sent when it is due, whatever the state of the others, and its latency is also counted from
then. The one exception is a turn whose session still waits for the previous answer: no client could send it earlier.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from headwater.load.answer import Answer
from headwater.load.endpoint import Endpoint, Exchange
from headwater.load.results import Result
from headwater.load.session import Call, Message, Session


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits after which no request is sent; running ones are awaited. None: no such limit."""

    requests: int | None = None
    duration: float | None = None  # seconds


class Talk:
    """A running session: its messages so far, and a lock that its turns take in order."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.messages: list[Message] = []
        self.turns = asyncio.Lock()  # fair: first come, first served
        self.broken = False  # an answer is missing, so no turn can follow


class Load:
    """One run against one endpoint. `on_result` is called with each request that ends."""

    def __init__(
        self,
        endpoint: Endpoint,
        limits: Limits,
        keep_recorded: bool = False,
        on_result: Callable[[Result], None] = lambda result: None,
    ) -> None:
        """`keep_recorded`: histories continue with the recorded answers instead of the received ones."""
        self._endpoint, self._limits, self._keep_recorded = endpoint, limits, keep_recorded
        self._on_result = on_result
        self._results: list[Result] = []
        self._stop = asyncio.Event()
        self._sent = 0
        self._running: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None  # an error of the generator itself, not of a request
        self._start = 0.0

    @property
    def running(self) -> int:
        return len(self._running)

    def stop(self) -> None:
        """Send no more requests and cancel the running ones; the run returns the results so far."""
        self._stop.set()
        for task in self._running:
            task.cancel()

    async def open_loop(self, calls: Iterable[Call]) -> list[Result]:
        """Send each call when it is due. Returns the results in order of being due."""
        self._start = time.perf_counter()
        talks: dict[int, Talk] = {}
        for call in calls:
            if not self._may_send(call.due) or not await self._wait_until(call.due):
                break
            talk = talks.setdefault(id(call.session), Talk(call.session))
            if call.turn + 1 == len(call.session.turns):
                del talks[id(call.session)]  # the tasks still hold it; an endless run must not
            self._begin(self._turn(talk, call.turn, self._number(), call.due))
        return await self._ended()

    async def closed_loop(self, sessions: Iterable[Session], clients: int) -> list[Result]:
        """Send from `clients` clients, each of which sends its session's next turn after the answer to the last one."""
        self._start = time.perf_counter()
        coming = iter(sessions)
        for _ in range(clients):
            self._begin(self._client(coming))
        return await self._ended()

    async def _client(self, coming: Iterator[Session]) -> None:
        for session in coming:
            talk = Talk(session)
            for turn in range(len(session.turns)):
                if not self._may_send(self._now()):
                    return
                if not talk.broken:
                    await self._turn(talk, turn, self._number(), self._now())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()
            self.stop()

    async def _ended(self) -> list[Result]:
        while self._running:
            await asyncio.wait(self._running)
        if self._fault is not None:
            raise self._fault
        return sorted(self._results, key=lambda result: result.number)

    def _may_send(self, due: float) -> bool:
        limits = self._limits
        if self._stop.is_set() or (limits.requests is not None and self._sent >= limits.requests):
            return False
        return limits.duration is None or due < limits.duration

    async def _wait_until(self, due: float) -> bool:
        """Sleep until a call is due; returns False if the run was stopped."""
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + due - self._now()):
                await self._stop.wait()
        except TimeoutError:
            return True
        return not self._stop.is_set()

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _number(self) -> int:
        self._sent += 1
        return self._sent - 1

    async def _turn(self, talk: Talk, index: int, number: int, due: float) -> None:
        try:
            async with talk.turns:
                result = await self._send(talk, index, number, due)
        except asyncio.CancelledError:  # while it waited for the previous answer
            result = self._skipped(talk, index, number, due, "the run was stopped")
        self._results.append(result)
        self._on_result(result)

    async def _send(self, talk: Talk, index: int, number: int, due: float) -> Result:
        session, turn = talk.session, talk.session.turns[index]
        if talk.broken:
            return self._skipped(talk, index, number, due, "an earlier turn has no answer")
        talk.messages += turn.messages
        path, body = self._endpoint.payload(turn, talk.messages, session.tenant)
        done = await self._endpoint.exchange(path, body)
        talk.broken = done.outcome != "ok"
        if done.answer is not None and turn.prompt is None:
            recorded = turn.reply is not None and self._keep_recorded
            talk.messages.append({"role": "assistant", "content": turn.reply if recorded else done.answer.text})
        return self._result(talk, index, number, due, done)

    def _skipped(self, talk: Talk, index: int, number: int, due: float, why: str) -> Result:
        now = time.perf_counter()
        return self._result(talk, index, number, due, Exchange(now, "skipped", now, detail=why))

    def _result(self, talk: Talk, index: int, number: int, due: float, done: Exchange) -> Result:
        answer = done.answer or Answer()
        return Result(
            number=number,
            session=talk.session.id,
            turn=index,
            tenant=talk.session.tenant,
            outcome=done.outcome,
            due=due,
            sent=done.sent - self._start,
            ended=done.ended - self._start,
            status=done.status,
            detail=done.detail,
            ttft=None if answer.first is None else answer.first - done.sent,
            gaps=tuple(answer.gaps),
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            finish_reason=answer.finish_reason,
            reason=answer.reason,
            resumed_at=answer.resumed_at,
        )
