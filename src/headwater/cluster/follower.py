"""Follower of one worker: subscribes to its messages, and keeps a complete picture of its cache.

After a gap it requests a replay; if that does not close the gap, or the worker was restarted, a snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType

import zmq

from headwater.cluster.messages import END, NUMBER_BYTES, SNAPSHOT, Message, MessageError
from headwater.cluster.picture import Picture
from headwater.cluster.sockets import Connect, connect_plain, opened, queued

ANSWER_SECONDS = 5.0  # until the next message of a worker's answer


class Follower:
    """Picture of one worker's cache, as of its last message. All methods are for one thread."""

    def __init__(
        self,
        live: str,
        replay: str,
        topic: str = "",
        answer_time: float = ANSWER_SECONDS,
        connect: Connect = connect_plain,
    ) -> None:
        """Connect to a worker's addresses."""
        self.picture = Picture()
        self.heard = time.monotonic()  # time of the last message: a worker that is idle sends one a second
        self.snapshots = self.replays = 0
        self._replay_address, self._answer_time, self._connect = replay, answer_time, connect
        self._live = opened(zmq.SUB)  # its queue has no limit: the worker drops messages for slow readers
        self._live.subscribe(topic)
        connect(self._live, live)

    def follow(self, seconds: float) -> None:
        """Apply messages for `seconds`."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._live.poll(int(left * 1000) + 1):
                self._receive()

    def close(self) -> None:
        self._live.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- one message

    def _receive(self) -> None:
        frames = self._live.recv_multipart()
        self.heard = time.monotonic()
        if len(frames) != 3:
            return
        message = Message(int.from_bytes(frames[1], "big"), frames[2])
        try:
            self._close_gap(message.number)
            if self.picture.apply(message):
                return
        except (MessageError, TimeoutError):
            self.picture.drop()
        self._resync()

    def _close_gap(self, number: int) -> None:
        """Apply the messages before `number` that are missing, if the worker still has them."""
        expected = self.picture.next
        if expected is not None and number > expected:
            self.replays += 1
            for message in self._asked(expected.to_bytes(NUMBER_BYTES, "big")):
                if not self.picture.apply(message):
                    return

    def _resync(self) -> None:
        """Take a snapshot, and the messages since; the picture stays empty if the worker does not answer."""
        self.snapshots += 1
        try:
            self.picture.load(self._asked(SNAPSHOT))
        except (MessageError, TimeoutError):
            self.picture.drop()

    def _asked(self, request: bytes) -> Iterator[Message]:
        """Yield the messages of an answer. Raises TimeoutError."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(
            zmq.DEALER
        )  # one a request: no late answer is taken for another
        try:
            socket.linger = 0
            socket.rcvhwm = 0
            self._connect(socket, self._replay_address)
            if not queued(socket, b"", request):
                raise TimeoutError(f"no connection to {self._replay_address}")
            while True:
                if not socket.poll(int(self._answer_time * 1000)):
                    raise TimeoutError(f"no answer from {self._replay_address} within {self._answer_time:g} s")
                _, number, payload = socket.recv_multipart()
                if number == END:
                    return
                yield Message(int.from_bytes(number, "big"), payload)
        finally:
            socket.close()
