"""Workers as Ray actors: Ray places, isolates and ends them; this starts them again and tells the router.

Nothing of a request goes through Ray: routers and workers talk over ZeroMQ. Ray's store is kept small, and its memory
monitor off, since a worker's memory is reserved at its start.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol

os.environ.setdefault("RAY_AUTH_MODE", "token")  # as Ray does from 2.61 on; it reads this when it is imported

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headwater.cluster.choice import Role
from headwater.cluster.curve import WorkerKeys
from headwater.cluster.hosting import Host, worker_config
from headwater.cluster.sockets import Contact
from headwater.config import ServeConfig
from headwater.errors import ConfigError
from headwater.setting import show_bytes

NAMESPACE, MAILBOX = "headwater", "headwater-cluster"  # Ray's names
STORE_BYTES = 100 * 10**6
SOON = 60.0  # seconds in which a worker is lost twice
AT_ONCE = 2.0  # seconds in which several routers lose a worker for the same reason
ENDING = 2.0  # seconds for a worker to end after what it may take to drain
CONNECTING = 3.0  # seconds for Ray to accept a connection
LOOKED = 0.1  # seconds between looks at the workers
AGAIN = 2.0  # seconds after which a worker that could not start is started again; doubled each time
LONGEST_AGAIN = 60.0

log = logging.getLogger("headwater.cluster")


class Membership(Protocol):
    """Router, as far as workers need it."""

    def join(self, name: str, contact: Contact) -> None: ...

    def drain(self, name: str) -> None: ...

    def leave(self, name: str) -> None: ...

    def is_idle(self, name: str) -> bool: ...


@dataclass(eq=False)
class Started:
    """One worker's actor."""

    name: str
    role: Role
    actor: Any
    contact: Any  # of its socket, once it is there
    ended: Any = None  # a result that is there when it has stopped
    draining: bool = False
    stopping: Any = None
    lost: float | None = None  # when the router lost it


def connect(address: str | None, cores: int) -> str:
    """Join the Ray cluster at an address, or start one on this machine; return its address. Raises ConfigError."""
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    shared: dict[str, Any] = {"namespace": NAMESPACE, "logging_level": logging.ERROR, "log_to_driver": True}
    own: dict[str, Any] = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    if address is not None and ":" in address:
        _check_open(address)  # Ray itself would try for minutes
    try:
        context: Any = ray.init(address=address or "local", **shared, **({} if address else own))
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"no Ray cluster at {address or 'this machine'}: {error}") from error
    return str(context.address_info["gcs_address"])


def _check_open(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECTING).close()
    except (OSError, ValueError) as error:
        raise ConfigError(f"no Ray cluster at {address}: {error}") from error


def own_address(address: str | None) -> str:
    """Return the address that a worker binds to: its host's, or loopback in a cluster of one machine."""
    if address is None:
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def disconnect() -> None:
    """Leave the Ray cluster; one that was started here ends."""
    ray.shutdown()


class Mailbox:
    """Actor by which other processes of a Ray cluster give commands to the router's process, and see its state."""

    def __init__(self) -> None:
        self._commands: list[tuple[str, ...]] = []
        self._state: dict[str, Any] = {}

    def post(self, command: tuple[str, ...]) -> None:
        """Add a command."""
        self._commands.append(command)

    def exchange(self, state: dict[str, Any]) -> list[tuple[str, ...]]:
        """Replace the state; return the commands, each once."""
        self._state, commands = state, self._commands
        self._commands = []
        return commands

    def state(self) -> dict[str, Any]:
        """Return the state."""
        return self._state


class OwnMailbox:
    """The mailbox of a cluster, on the host of the router's process: if it ends, Ray starts it again."""

    def __init__(self) -> None:
        """Make it. Raises ConfigError if this Ray cluster has one already."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        mailboxes: Any = ray.remote(Mailbox)
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
        try:
            self._actor = mailboxes.options(name=MAILBOX, **options).remote()
        except ValueError as error:
            shown = "a cluster of Headwater runs here already: `headwater cluster status` shows it"
            raise ConfigError(shown) from error

    def exchange(self, state: dict[str, Any]) -> list[tuple[str, ...]]:
        """Show a state, and return the commands that came since; none if Ray does not reach the mailbox now."""
        try:
            commands: list[tuple[str, ...]] = ray.get(self._actor.exchange.remote(state))
            return commands
        except RayError as error:
            log.warning("no command arrives, since Ray does not reach the mailbox: %s", error)
        return []


def mailbox_at(address: str | None) -> Any:
    """Return the mailbox of the cluster at an address of Ray. Raises ConfigError."""
    connect(address or "auto", 0)
    try:
        return ray.get_actor(MAILBOX)
    except ValueError as error:
        raise ConfigError("no cluster of Headwater runs in this Ray cluster") from error


class RayWorkers:
    """As many workers as are wanted: those that end are started again."""

    def __init__(
        self,
        config: ServeConfig,
        wanted: Mapping[Role, int],
        router: Membership,
        keys: WorkerKeys,
        address: str | None,
        cores: int,
        share_weights: bool,
    ) -> None:
        """`config`: of the whole host, whose memory and cores the workers share. `address`: of Ray; None: its own.

        `share_weights`: workers of one host hold the model's weights once.
        """
        self.wanted, self._share_weights = dict(wanted), share_weights
        workers = sum(wanted.values())
        self._threads = max(1, cores // workers)
        self._cpus = 0 if address is None else self._threads  # a machine of its own may have more workers than cores
        self._config = worker_config(config, workers, self._threads)
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
        return f"{show_bytes(self._config.memory)} and {threads} each"

    def start(self) -> None:
        """Start the workers, and keep as many."""
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until all workers have joined the router; False if they have not within `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._closing.is_set():
            with self._lock:
                joined = [one for one in self._started.values() if one.ended is not None and not one.draining]
            if len(joined) >= sum(self.wanted.values()):
                return True
            time.sleep(LOOKED)
        return False

    def scale(self, wanted: int, role: Role) -> None:
        """Change the number of a role's workers; those that are too many are drained.

        Memory is divided as at the start.
        """
        with self._lock:
            self.wanted[role] = wanted
            staying = [one for one in self._started.values() if one.role == role and not one.draining]
            for one in staying[wanted:]:
                self._drain(one)

    def drain(self, name: str) -> None:
        """Let a worker end its requests and stop; another one is started in its place. Unknown names are ignored."""
        with self._lock:
            if name in self._started:
                self._drain(self._started[name])

    def lost(self, name: str) -> None:
        """Note that the router takes a worker for lost. Never waits.

        It may come back, if its machine was busy; if it is lost again soon, it is killed, and another is started.
        """
        self._lost.append(name)

    def close(self) -> None:
        """Stop all workers."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        stopping = [
            one.actor.stop.remote(self._config.drain) for one in self._started.values() if one.ended is not None
        ]
        if stopping:  # tiers take what is cached
            ray.wait(stopping, num_returns=len(stopping), timeout=self._config.drain + ENDING)
        for one in self._started.values():
            ray.kill(one.actor, no_restart=True)

    # -- on its own thread

    def _run(self) -> None:
        while not self._closing.wait(LOOKED):
            try:
                with self._lock:
                    while self._lost:
                        self._look_for(self._lost.popleft())
                    for one in tuple(self._started.values()):
                        self._look(one)
                    if time.monotonic() >= self._again:
                        for role in self._missing():
                            self._start(role)
            except RayError:
                log.exception("Ray does not answer")

    def _missing(self) -> list[Role]:
        """Return the role of each worker that is to be started."""
        there = Counter(one.role for one in self._started.values() if not one.draining)
        return [role for role, wanted in self.wanted.items() for _ in range(wanted - there[role])]

    def _look_for(self, name: str) -> None:
        """Try once more to reach a worker that was lost, or kill it."""
        one = self._started.get(name)
        if one is None:
            return
        now = time.monotonic()
        since = SOON if one.lost is None else now - one.lost
        if since >= SOON:
            one.lost = now
        if since >= SOON or since < AT_ONCE:
            self._router.join(name, ray.get(one.contact))
        else:
            del self._started[name]
            ray.kill(one.actor, no_restart=True)

    def _start(self, role: Role) -> None:
        name = next(self._names)
        variables = {"OMP_NUM_THREADS": str(self._threads), "RAY_memory_monitor_refresh_ms": "0"}
        hosts: Any = ray.remote(Host)
        options = {"num_cpus": self._cpus, "max_restarts": 0, "max_concurrency": 4}
        actor = hosts.options(**options, runtime_env={"env_vars": variables}).remote(
            self._config, self._keys, self._own_address, share_weights=self._share_weights, role=role
        )
        self._started[name] = Started(name, role, actor, actor.contact.remote())

    def _look(self, one: Started) -> None:
        """Note what became of a worker since the last look."""
        if one.ended is None:
            self._look_whether_it_loaded(one)
        elif ray.wait([one.ended], timeout=0)[0]:
            del self._started[one.name]
            self._router.leave(one.name)
            if not one.draining:
                log.warning("worker %s has ended, another one is started", one.name)
        elif one.draining and one.stopping is None and self._router.is_idle(one.name):
            one.stopping = one.actor.stop.remote(self._config.drain)

    def _look_whether_it_loaded(self, one: Started) -> None:
        if not ray.wait([one.contact], timeout=0)[0]:
            return
        try:
            contact = ray.get(one.contact)
        except RayError as error:
            del self._started[one.name]
            self._failures += 1
            wait = min(LONGEST_AGAIN, AGAIN * 2 ** (self._failures - 1))
            self._again = time.monotonic() + wait
            log.error("worker %s could not start, again in %.0f s: %s", one.name, wait, error)
            return
        self._failures = 0
        one.ended = one.actor.wait.remote()
        self._router.join(one.name, contact)

    def _drain(self, one: Started) -> None:
        one.draining = True
        self._router.drain(one.name)
