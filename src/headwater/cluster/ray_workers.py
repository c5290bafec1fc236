"""Workers as Ray actors: Ray places, isolates and ends them; `RayWorkers` restarts them and informs the router.

Requests do not pass through Ray: routers and workers communicate over ZeroMQ.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Protocol

from headwater.cluster.ray_cluster import own_address  # first: it sets what Ray reads when it is imported

# isort: split
import ray
from ray.exceptions import RayError

from headwater.cluster.cost import Role
from headwater.cluster.encryption import WorkerKeys
from headwater.cluster.hosting import Host, worker_config
from headwater.cluster.sockets import Contact
from headwater.cluster.upgrade import Drain, Member, Start, Upgrade
from headwater.config import ServeConfig
from headwater.errors import ConfigError
from headwater.setting import show_bytes

REPEATED_LOSS_SECONDS = 60.0  # a worker that is lost twice within them is killed
SAME_LOSS_SECONDS = 2.0  # losses of a worker by several routers within them are one loss
END_SECONDS = 2.0  # for a worker to end after its time to drain
IDLE_SECONDS = 1.0  # without requests, until a draining worker is stopped: a request may be on its way to it
JOIN_SECONDS = 600.0  # for a worker to load and to serve
POLL_SECONDS = 0.1  # between checks of the workers
RESTART_SECONDS = 2.0  # until the next attempt to start a worker; doubled each time
MAX_RESTART_SECONDS = 60.0

log = logging.getLogger("headwater.cluster")


class Membership(Protocol):
    """Router as workers use it."""

    def join(self, name: str, contact: Contact) -> None: ...

    def drain(self, name: str) -> None: ...

    def leave(self, name: str) -> None: ...

    def is_idle(self, name: str) -> bool: ...

    def serves(self, name: str) -> bool: ...


@dataclass(eq=False)
class Started:
    """One worker's actor."""

    name: str
    role: Role
    config: ServeConfig  # of its whole host
    actor: Any
    contact: Any  # of its socket, once it is there
    ended: Any = None  # a result that is ready when it has stopped
    draining: bool = False
    idle: float | None = None  # since then it has had no requests while it drains
    stopping: Any = None
    lost: float | None = None  # when the router lost it
    served: bool = False  # requests were given to it
    began: float = field(default_factory=time.monotonic)


def last_line(error: RayError) -> str:
    """Return the last line of an error, the reason of a failed process, without the traceback before it."""
    return str(error).strip().rpartition("\n")[2]


class RayWorkers:
    """Keeper of the wanted number of workers, which restarts those that end."""

    def __init__(
        self,
        config: ServeConfig,
        wanted: Mapping[Role, int],
        router: Membership,
        keys: WorkerKeys,
        address: str | None,
        hosts: Sequence[int],
        share_weights: bool,
    ) -> None:
        """`config`: of a whole host, whose memory its workers share. `address`: of Ray; None: its own.

        `hosts`: cores of each host now. `share_weights`: workers of one host hold the model's weights once.
        """
        self.wanted, self._share_weights = dict(wanted), share_weights
        self.config = config
        self.upgrade: Upgrade | None = None  # the last one
        self.upgraded: Callable[[ServeConfig], None] = lambda config: None  # called after each one
        self._of_host = -(-sum(wanted.values()) // len(hosts))  # workers, at most
        self._threads = max(1, min(hosts) // self._of_host)
        self._share = self._next_share = self._share_of(config)  # settings of one worker; and in an upgrade
        self._cpus = 0 if address is None else self._threads  # a machine of its own may have more workers than cores
        self._router, self._keys, self._own_address = router, keys, partial(own_address, address)
        self._started: dict[str, Started] = {}
        self._lost: deque[str] = deque()
        self._names = (f"w{number}" for number in count())
        self._again, self._failures = 0.0, 0
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="headwater-workers", daemon=True)

    @property
    def shares(self) -> str:
        """Share of memory and threads that each worker has, as text."""
        threads = "1 thread" if self._threads == 1 else f"{self._threads} threads"
        return f"{show_bytes(self._share.memory)} and {threads} each"

    def _share_of(self, config: ServeConfig) -> ServeConfig:
        """Return the settings of one worker. Reads files that they name, which may be gone later."""
        return worker_config(config, self._of_host, self._threads)

    def start(self) -> None:
        """Start the workers, and keep their number."""
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until all workers have joined the router; False if they have not within `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._closing.is_set():
            with self._lock:
                joined = [one for one in self._started.values() if one.ended is not None and not one.draining]
            if len(joined) >= sum(self.wanted.values()):
                return True
            time.sleep(POLL_SECONDS)
        return False

    def scale(self, wanted: int, role: Role) -> None:
        """Change the number of a role's workers; surplus ones are drained, after an upgrade.

        Memory is divided as at the start.
        """
        with self._lock:
            self.wanted[role] = wanted

    def drain(self, name: str) -> None:
        """Let a worker end its requests and stop, and start another one. Unknown names are ignored."""
        with self._lock:
            if name in self._started:
                self._drain(self._started[name])

    def begin(self, upgrade: Upgrade) -> None:
        """Replace all workers, one after another. Raises ConfigError during an upgrade, or if it is impossible."""
        with self._lock:
            if self.upgrade is not None and not self.upgrade.ended:
                raise ConfigError("an upgrade is already in progress")
            if upgrade.drain_first and sum(self.wanted.values()) == 1:
                raise ConfigError("the only worker cannot be drained before another one serves")
            self._next_share = self._share_of(upgrade.config)
            self.upgrade = upgrade

    def lost(self, name: str) -> None:
        """Note that the router has lost a worker. Never waits.

        A worker on a busy machine may return. If it is lost again soon, it is killed, and another one is started.
        """
        self._lost.append(name)

    def close(self) -> None:
        """Stop all workers."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        stopping = [one.actor.stop.remote(self.config.drain) for one in self._started.values() if one.ended is not None]
        if stopping:  # tiers store the cache
            ray.wait(stopping, num_returns=len(stopping), timeout=self.config.drain + END_SECONDS)
        for one in self._started.values():
            ray.kill(one.actor, no_restart=True)

    # -- on its own thread

    def _run(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            try:
                with self._lock:
                    while self._lost:
                        self._look_for(self._lost.popleft())
                    for one in tuple(self._started.values()):
                        self._look(one)
                    if self.upgrade is not None and not self.upgrade.ended:
                        self._continue(self.upgrade)
                    else:
                        self._keep_number()
            except RayError:
                log.exception("Ray does not answer")
            except Exception as error:
                log.exception("workers could not be checked")
                if self.upgrade is not None and not self.upgrade.ended:
                    self.upgrade.abort(f"workers could not be checked: {error}")

    def _keep_number(self) -> None:
        """Drain surplus workers, and start missing ones."""
        for role, wanted in self.wanted.items():
            staying = [one for one in self._started.values() if one.role == role and not one.draining]
            for one in staying[wanted:]:
                self._drain(one)
            if time.monotonic() >= self._again:
                for _ in range(wanted - len(staying)):
                    self._start(role, self.config)

    def _continue(self, upgrade: Upgrade) -> None:
        """Take the next step of an upgrade. Kill a worker that never serves; if it is new, abort the upgrade."""
        for one in self._started.values():
            if not one.served and time.monotonic() - one.began > JOIN_SECONDS:
                ray.kill(one.actor, no_restart=True)
                self._gone(one, f"does not serve after {JOIN_SECONDS:.0f} s: is there memory for one more?")
                return
        members = [
            Member(one.name, one.role, one.config is upgrade.config, one.draining, self._router.serves(one.name))
            for one in self._started.values()
        ]
        match upgrade.step(members, self.wanted):
            case Start(role):
                upgrade.said.append(f"{self._start(role, upgrade.config)} starts")
            case Drain(name):
                upgrade.said.append(f"{name} is drained")
                self._drain(self._started[name])
            case None if upgrade.ended:
                self.config, self._share = upgrade.config, self._next_share
                self.upgraded(self.config)

    def _gone(self, one: Started, why: str) -> None:
        """Forget a worker. If it is a new one of an upgrade that has not served, abort the upgrade."""
        del self._started[one.name]
        self._router.leave(one.name)
        upgrade = self.upgrade
        if upgrade is None or upgrade.ended:
            return
        upgrade.said.append(f"{one.name} has ended")
        if one.config is upgrade.config and not one.served:
            upgrade.abort(f"worker {one.name} {why}")
            log.error("%s", upgrade.error)

    def _look_for(self, name: str) -> None:
        """Try again to reach a lost worker, or kill it."""
        one = self._started.get(name)
        if one is None:
            return
        now = time.monotonic()
        since = REPEATED_LOSS_SECONDS if one.lost is None else now - one.lost
        if since >= REPEATED_LOSS_SECONDS:
            one.lost = now
        if since >= REPEATED_LOSS_SECONDS or since < SAME_LOSS_SECONDS:
            self._join(one, ray.get(one.contact))
        else:
            self._gone(one, "was not heard by a router")
            ray.kill(one.actor, no_restart=True)

    def _join(self, one: Started, contact: Contact) -> None:
        self._router.join(one.name, contact)
        if one.draining:
            self._router.drain(one.name)

    def _start(self, role: Role, config: ServeConfig) -> str:
        """Start a worker; return its name."""
        name = next(self._names)
        variables = {"OMP_NUM_THREADS": str(self._threads), "RAY_memory_monitor_refresh_ms": "0"}
        hosts: Any = ray.remote(Host)
        options = {"num_cpus": self._cpus, "scheduling_strategy": "SPREAD", "max_restarts": 0, "max_concurrency": 4}
        actor = hosts.options(**options, runtime_env={"env_vars": variables}).remote(
            self._share if config is self.config else self._next_share,
            self._keys,
            self._own_address,
            share_weights=self._share_weights,
            role=role,
        )
        self._started[name] = Started(name, role, config, actor, actor.contact.remote())
        return name

    def _look(self, one: Started) -> None:
        """Note changes of a worker since the last check."""
        if not one.served and self._router.serves(one.name):
            one.served = True
            if self.upgrade is not None and not self.upgrade.ended and one.config is self.upgrade.config:
                self.upgrade.said.append(f"{one.name} serves")
        if one.ended is None:
            self._check_load(one)
        elif ray.wait([one.ended], timeout=0)[0]:
            self._gone(one, "has ended before it served")
            if not one.draining:
                log.warning("worker %s has ended, another one is started", one.name)
        elif one.draining and one.stopping is None:
            self._stop_if_idle(one)

    def _stop_if_idle(self, one: Started) -> None:
        now = time.monotonic()
        one.idle = (one.idle or now) if self._router.is_idle(one.name) else None
        if one.idle is not None and now - one.idle >= IDLE_SECONDS:
            one.stopping = one.actor.stop.remote(self.config.drain)

    def _check_load(self, one: Started) -> None:
        if not ray.wait([one.contact], timeout=0)[0]:
            return
        try:
            contact = ray.get(one.contact)
        except RayError as error:
            self._gone(one, f"could not start: {last_line(error)}")
            self._failures += 1
            wait = min(MAX_RESTART_SECONDS, RESTART_SECONDS * 2 ** (self._failures - 1))
            self._again = time.monotonic() + wait
            log.error("worker %s could not start, next attempt in %.0f s: %s", one.name, wait, error)
            return
        self._failures = 0
        one.ended = one.actor.wait.remote()
        self._join(one, contact)

    def _drain(self, one: Started) -> None:
        one.draining = True
        self._router.drain(one.name)
