"""Publisher of a cache's events over ZeroMQ, on a thread of its own: live messages, replays and snapshots.

Live messages are three frames on a PUB socket: topic, number (8 bytes, big endian), payload. A request to the ROUTER
socket is a number from which to replay, or `snapshot`; its answer is messages of two frames, number and payload, and
then one with number -1 and no payload. Source: vLLM's `ZmqEventPublisher`; snapshots are Headwater's.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import zmq

from headwater.cache.changes import Change, ChangeLog
from headwater.cache.prefix_cache import PrefixCache
from headwater.cache_folder import own_folder
from headwater.cluster.ledger import EventStream, Ledger, PlainTokens, Tokens
from headwater.cluster.messages import END, NUMBER_BYTES, SNAPSHOT, Digests, Message
from headwater.cluster.sockets import PLAIN, Server, Sockets, Waker
from headwater.cluster.store_ledger import PublishedTier, StoreLedger, StoreWatch
from headwater.config import ServeConfig
from headwater.errors import ConfigError
from headwater.setting import SettingError
from headwater.threads import run_again
from headwater.tiers.changes import StoreLog
from headwater.tiers.names import read_key

HEARTBEAT_SECONDS = 1.0  # without a message
MAX_QUEUED_STEPS = 10_000  # whose changes wait for the thread
STOP_SECONDS = 2.0  # for the thread to send queued messages
NO_TIERS: Mapping[str, PublishedTier] = {}

log = logging.getLogger("headwater.events")


class Publisher:
    """Sends a cache's changes: evictions before the step that needs their pages, all others after it.

    The cache's `changes` are a ChangeLog.
    """

    def __init__(
        self,
        cache: PrefixCache,
        stream: EventStream,
        sockets: Sockets,
        topic: str,
        stores: Sequence[tuple[StoreLog, StoreLedger]] = (),
    ) -> None:
        """`stores`: logs of the stores that the stream has the ledgers of."""
        assert isinstance(cache.changes, ChangeLog), "the cache keeps no log of its changes"
        self._cache, self._log = cache, cache.changes
        self._stream, self._sockets, self._topic = stream, sockets, topic.encode()
        self._queue: deque[tuple[list[Change], bool]] = deque()  # changes, and whether they are all that there is
        self._behind = True  # the queue was full, or nothing was sent yet: the whole content is sent next
        self._closing = False
        self._stores, self._waker = stores, Waker()
        for changes, _ in stores:
            changes.wake = self._waker.wake
        self._thread = threading.Thread(target=self._run, name="headwater-events", daemon=True)

    def start(self) -> None:
        """Send the content of the cache, and begin."""
        self.stepped()
        self._thread.start()

    def close(self) -> None:
        """Send queued messages, within two seconds, and close the sockets."""
        self._closing = True
        self._waker.wake()
        self._thread.join(STOP_SECONDS)

    # -- on the engine's thread

    def stepped(self) -> None:
        """Queue the changes since the last call; no other thread may change the cache meanwhile. Never waits.

        If the queue is full they are dropped, and readers get AllBlocksCleared; once the queue is empty, they get the
        whole content.
        """
        changes = self._log.take()
        if self._behind:
            if not self._queue:
                self._behind = False
                self._put(self._cache.contents(), True)
        elif changes and len(self._queue) < MAX_QUEUED_STEPS:
            self._put(changes, False)
        elif changes:
            log.warning("%d steps wait to be published: readers will get the whole content again", MAX_QUEUED_STEPS)
            self._put([], True)
            self._behind = True

    def _put(self, changes: list[Change], is_all: bool) -> None:
        self._queue.append((changes, is_all))
        self._waker.wake()

    # -- on its own thread

    def _run(self) -> None:
        run_again(self._publish, lambda: self._closing)
        self._sockets.close()
        self._waker.close()

    def _publish(self) -> None:
        poller = zmq.Poller()
        poller.register(self._sockets.replay, zmq.POLLIN)
        poller.register(self._waker, zmq.POLLIN)
        due = time.monotonic() + HEARTBEAT_SECONDS
        while not self._closing or self._queue:
            poller.poll(int(max(0.0, due - time.monotonic()) * 1000) + 1)
            self._waker.clear()
            if self._send_queued() | self._send_stored():
                due = time.monotonic() + HEARTBEAT_SECONDS
            if time.monotonic() >= due:
                self._send(self._stream.heartbeat())
                due = time.monotonic() + HEARTBEAT_SECONDS
            self._answer()

    def _send_queued(self) -> bool:
        """Send the messages of queued steps; return whether there were any. After an error the next has all content."""
        sent = False
        while self._queue:
            changes, is_all = self._queue[0]
            try:
                self._send(self._stream.begin(changes) if is_all else self._stream.step(changes))
            except Exception:
                self._behind = True
                self._queue.clear()
                raise
            self._queue.popleft()
            sent = True
        return sent

    def _send_stored(self) -> bool:
        """Send the changes of stores; return whether there were any."""
        messages = [self._stream.stored(ledger, changes.take()) for changes, ledger in self._stores]
        for message in filter(None, messages):
            self._send(message)
        return any(messages)

    def _send(self, message: Message) -> None:
        number = message.number.to_bytes(NUMBER_BYTES, "big")
        self._sockets.live.send_multipart((self._topic, number, message.payload))

    def _answer(self) -> None:
        """Answer one request, if there is any."""
        try:
            frames = self._sockets.replay.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if len(frames) != 3:
            return
        reader, _, request = frames
        try:
            for message in self._asked(request):
                self._reply(reader, message.number.to_bytes(NUMBER_BYTES, "big"), message.payload)
        except Exception as error:  # other readers are answered
            log.warning("a reader's request of %d bytes is not answered: %s", len(request), type(error).__name__)
        self._reply(reader, END, b"")

    def _asked(self, request: bytes) -> Iterator[Message]:
        if request == SNAPSHOT:
            yield from self._stream.snapshot()
        elif len(request) == NUMBER_BYTES:
            yield from self._stream.replay(int.from_bytes(request, "big"))

    def _reply(self, reader: bytes, number: bytes, payload: bytes) -> None:
        with suppress(zmq.Again):  # the reader does not read: it will find a gap
            self._sockets.replay.send_multipart((reader, b"", number, payload), zmq.NOBLOCK)


class Publishing:
    """Sockets and key of the settings, and from `start` on, a publisher."""

    def __init__(self, config: ServeConfig, key: bytes | None = None, server: Server = PLAIN) -> None:
        """Bind the sockets, and read the key if it is not given. Raises SettingError."""
        self._config, self._key, self._server = config, key or _key_of(config), server
        self._sockets = _bound(config, server)
        self.addresses = self._sockets.addresses
        self._publisher: Publisher | None = None
        self._watches: list[StoreWatch] = []

    def start(self, cache: PrefixCache, tiers: Mapping[str, PublishedTier] = NO_TIERS) -> Callable[[], None]:
        """Publish the content of a cache, and then its changes at each call of the returned function.

        `tiers`: by medium; each is published, too, while no other server has it.
        """
        config, layout = self._config, cache.layout
        for address in self._server.exposed(self.addresses):
            log.warning("KV events are readable by all who can connect to %s: they are not encrypted", address)
        tokens = PlainTokens(layout.unit_bytes) if config.kv_events_tokens else Tokens()
        digests = Digests(self._key, layout.unit_bytes)
        self._watches = [StoreWatch(tier, digests, layout) for tier in tiers.values()]
        ledgers = [StoreLedger(medium, digests, layout.unit_tokens) for medium in tiers]
        stream = EventStream(Ledger(layout, digests, tokens), uuid.uuid4().bytes, stores=ledgers)
        stores = [(watch.log, ledger) for watch, ledger in zip(self._watches, ledgers, strict=True)]
        self._publisher = Publisher(cache, stream, self._sockets, config.kv_events_topic, stores)
        self._publisher.start()
        for watch in self._watches:
            watch.start()
        return self._publisher.stepped

    def close(self) -> None:
        """Send queued messages, and close the sockets."""
        for watch in self._watches:
            watch.close()
        if self._publisher is not None:
            self._publisher.close()
        self._sockets.close()


def _key_of(config: ServeConfig) -> bytes:
    try:
        return read_key(config.kv_events_key or own_folder() / "kv-events-key", "key of KV events")
    except (ConfigError, OSError) as error:
        raise SettingError("kv_events_key", repr(str(config.kv_events_key or "")), f"but {error}") from error


def _bound(config: ServeConfig, server: Server) -> Sockets:
    try:
        return Sockets(config.kv_events_endpoint, config.kv_events_replay_endpoint, server)
    except zmq.ZMQError as error:
        shown = f"'{config.kv_events_endpoint}', and kv_events_replay_endpoint '{config.kv_events_replay_endpoint}'"
        raise SettingError("kv_events_endpoint", shown, f"which cannot both be bound: {error}") from error
