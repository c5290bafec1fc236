"""ZeroMQ sockets of a publisher, and of its readers."""

from __future__ import annotations

import zmq

from headwater.cluster.stream import KEPT_MESSAGES

LIVE_QUEUE = 10_000  # messages that wait for one subscriber; further ones are dropped for it
ANSWERS_QUEUE = KEPT_MESSAGES + 1_000  # messages that wait for one reader of a replay or a snapshot


def opened(kind: int, sends: int = 0, receives: int = 0) -> zmq.Socket[bytes]:
    """Return a socket whose queues hold that many messages (0: no limit). Closing it drops what they hold."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    for option, value in ((zmq.SNDHWM, sends), (zmq.RCVHWM, receives), (zmq.LINGER, 0)):
        socket.setsockopt(option, value)
    return socket


class Sockets:
    """The two bound sockets of a publisher."""

    def __init__(self, live: str, replay: str) -> None:
        """Bind to addresses such as tcp://127.0.0.1:5557; port * is any free one. Raises zmq.ZMQError."""
        self.live, self.replay = opened(zmq.PUB, LIVE_QUEUE), opened(zmq.ROUTER, ANSWERS_QUEUE)
        try:
            self.live.bind(live)
            self.replay.bind(replay)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def addresses(self) -> tuple[str, str]:
        """The addresses that the sockets are bound to."""
        live, replay = (one.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") for one in (self.live, self.replay))
        return live, replay

    def close(self) -> None:
        self.live.close()
        self.replay.close()
