"""Tenants of a server: its API keys with their use in the last minute, read from their file again at SIGHUP."""

from __future__ import annotations

import hmac
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from headwater.api_keys import ApiKey
from headwater.config import ServeConfig
from headwater.errors import ConfigError

RUNNING_RETRY_SECONDS = 1  # for a request that waits for the end of another one
Clock = Callable[[], float]

log = logging.getLogger("headwater.server")


@dataclass
class Meter:
    """Amount that was used lately; it falls evenly, by the limit in a minute."""

    clock: Clock
    used: float = 0.0

    def __post_init__(self) -> None:
        self._at = self.clock()

    def add(self, amount: int, limit: int | None) -> None:
        """Add an amount, which may exceed the limit."""
        if limit is not None:
            now = self.clock()
            self.used = max(0.0, self.used - limit / 60 * (now - self._at)) + amount
            self._at = now

    def wait(self, limit: int | None) -> float:
        """Return the seconds until one more is within the limit."""
        self.add(0, limit)
        return 0.0 if limit is None else max(0.0, (self.used + 1 - limit) * 60 / limit)


@dataclass
class Use:
    """Use of one key, which outlives a change of its limits."""

    clock: Clock
    running: int = 0  # requests

    def __post_init__(self) -> None:
        self.requests, self.tokens = Meter(self.clock), Meter(self.clock)


@dataclass(frozen=True)
class Tenant:
    """A key with its use. Requests that run keep theirs when the file is read again."""

    key: ApiKey
    use: Use = field(repr=False)

    @property
    def has_ended(self) -> bool:
        """Return whether the key's end date has passed."""
        return self.key.until is not None and datetime.now(UTC) >= self.key.until

    def refusal(self) -> tuple[str, int] | None:
        """Return which limit does not admit another request, and the seconds after which one may be admitted."""
        key, use = self.key, self.use
        if key.running is not None and use.running >= key.running:
            return f"{use.running:,} requests run, the key has {key.running:,} at once", RUNNING_RETRY_SECONDS
        for name, meter, limit in (
            ("requests", use.requests, key.requests_per_minute),
            ("tokens", use.tokens, key.tokens_per_minute),
        ):
            seconds = math.ceil(meter.wait(limit))
            if seconds:
                return f"{meter.used:,.0f} {name} were used, the key has {limit:,} a minute", seconds
        return None

    def begin(self) -> None:
        """Count a request that was admitted."""
        self.use.running += 1
        self.use.requests.add(1, self.key.requests_per_minute)

    def end(self) -> None:
        """Note the end of a request."""
        self.use.running -= 1

    def charge(self, tokens: int) -> None:
        """Count tokens of a prompt or an answer."""
        self.use.tokens.add(tokens, self.key.tokens_per_minute)


class Tenants:
    """The tenants of a server. It has none if no key is needed."""

    def __init__(self, config: ServeConfig, clock: Clock = time.monotonic) -> None:
        self._config = config
        self._uses: dict[str, Use] = defaultdict(lambda: Use(clock))  # by name
        self._tenants = self._of(config.accepted_keys())

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def _of(self, keys: tuple[ApiKey, ...]) -> list[Tenant]:
        return [Tenant(key, self._uses[key.name]) for key in keys]

    def find(self, sent: Iterable[bytes]) -> Tenant | None:
        """Return the tenant with one of these keys, in a time that depends on their number only."""
        pairs = [(one, secret) for secret in sent for one in self._tenants]
        found = [one for one, secret in pairs if hmac.compare_digest(secret, one.key.secret)]
        return found[0] if found else None

    def renew(self) -> None:
        """Read the keys again. If their file is invalid, the earlier ones stay in use."""
        try:
            self._tenants = self._of(self._config.accepted_keys())
        except ConfigError as error:
            log.error("SIGHUP: the earlier API keys stay: %s", error)
        else:
            log.info("SIGHUP: %s was read again, API keys: %d", self._config.api_key_file, len(self._tenants))
