"""Events from the engine's thread: all come, in order, and those that are ready together are written together."""

import asyncio

import pytest

from headwater.account import CacheAccount, Reason
from headwater.errors import EngineStopped
from headwater.events import FailedEvent, FinishedEvent, TokenEvent
from headwater.request import Generation, SamplingParams
from headwater.server.http.exchange import MAX_HELD_CHARACTERS, EventStream, Exchange

ASK = Generation((1,), SamplingParams())
END = FinishedEvent("stop", "", CacheAccount(1, 0, 0, 0, Reason.COLD), 1)


class Mouths:
    """Engine whose events a test sends by hand."""

    def __init__(self):
        self.say, self.cancelled = [], []

    def submit(self, generation, on_event):
        self.say.append(on_event)
        return len(self.say) - 1

    def cancel(self, request_id):
        self.cancelled.append(request_id)


def begun(n=1):
    engine = Mouths()
    exchange = Exchange(engine)
    exchange.submit_all([ASK] * n)
    return engine, exchange, exchange.events()


def token(text):
    return TokenEvent(1, text)


def test_events_of_several_generations_keep_their_order():
    async def go():
        engine, _, events = begun(2)
        for number, event in [(0, token("a")), (1, token("b")), (0, END), (1, token("c")), (1, END)]:
            engine.say[number](event)
        return [(number, getattr(event, "text", None)) async for number, event in events]

    assert asyncio.run(go()) == [(0, "a"), (1, "b"), (0, ""), (1, "c"), (1, "")]


def test_late_wakeup_for_a_read_event_is_ignored():
    async def go():
        engine, _, events = begun()
        engine.say[0](token("a"))
        assert (await anext(events))[1].text == "a"  # taken before the loop could make its call
        waiting = asyncio.ensure_future(anext(events))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        engine.say[0](token("b"))
        assert (await waiting)[1].text == "b"

    asyncio.run(go())


def test_failure_follows_the_events_before_it():
    async def go():
        engine, exchange, events = begun(2)
        engine.say[0](token("a"))
        engine.say[0](FailedEvent(EngineStopped("gone")))
        assert (await anext(events))[1].text == "a"
        with pytest.raises(EngineStopped):
            await anext(events)
        exchange.cancel()
        assert engine.cancelled == [1]

    asyncio.run(go())


def written(bursts):
    """Return the bodies that a stream sends for bursts of texts that are ready together."""

    async def go():
        engine, exchange, events = begun()
        sent, ended = [], []

        async def texts():
            async for _, event in events:
                if event.text:
                    yield event.text

        stream = EventStream(texts(), lambda: ended.append(True))
        exchange.before_waiting = stream.flush

        async def send(message):
            sent.append(message)

        async def receive():
            await asyncio.Event().wait()

        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        sending = asyncio.ensure_future(stream(scope, receive, send))
        for burst in bursts:
            for text in burst:
                engine.say[0](token(text))
            for _ in range(20):
                await asyncio.sleep(0)
        engine.say[0](END)
        await sending
        assert ended == [True]
        return [message["body"].decode() for message in sent if message.get("body")]

    return asyncio.run(go())


def test_bodies_ready_together_are_written_together_without_waiting():
    assert written([["a"], ["b", "c", "d"], ["e"]]) == ["a", "bcd", "e"]


def test_events_without_text_delay_no_others():
    assert written([["a", ""], ["", "b"]]) == ["a", "b"]


def test_one_write_is_bounded_in_size():
    bodies = written([["x" * 1000] * 50])
    assert "".join(bodies) == "x" * 50_000
    assert max(map(len, bodies)) <= MAX_HELD_CHARACTERS + 1000
