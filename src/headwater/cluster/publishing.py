"""Publishing of one server's events, by its settings."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping

import zmq

from headwater.cache.prefix_cache import PrefixCache
from headwater.cache_folder import own_folder
from headwater.cluster.digests import Digests
from headwater.cluster.ledger import Ledger, PlainTokens, Tokens
from headwater.cluster.publisher import Publisher
from headwater.cluster.sockets import PLAIN, Server, Sockets
from headwater.cluster.store_ledger import StoreLedger
from headwater.cluster.store_watch import PublishedTier, StoreWatch
from headwater.cluster.stream import EventStream
from headwater.config import ServeConfig
from headwater.errors import ConfigError
from headwater.setting import SettingError
from headwater.tiers.names import read_key

NO_TIERS: Mapping[str, PublishedTier] = {}

log = logging.getLogger("headwater.events")


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
