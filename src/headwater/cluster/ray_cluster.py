"""Ray cluster, as the process of `headwater cluster up` and the other commands join it, and find each other there.

Ray's store is kept small, and its memory monitor off, since a worker's memory is reserved at its start.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "token")  # as Ray does from 2.61 on; it reads this when it is imported

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headwater.errors import ConfigError

NAMESPACE, MAILBOX = "headwater", "headwater-cluster"  # Ray's names
STORE_BYTES = 100 * 10**6
CONNECT_SECONDS = 3.0  # for Ray to accept a connection
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"  # until processes without Ray's head end
ORDERLY_END_SECONDS = 20.0  # before that, for an orderly end of the cluster
WATCH_SECONDS = 2.0  # between checks of Ray's head

log = logging.getLogger("headwater.cluster")


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


def hosts() -> list[int]:
    """Return the cores of each machine of the cluster that has any for workers."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    alive = (node["Resources"].get("CPU", 0) for node in nodes if node["Alive"])
    return [int(cores) for cores in alive if cores >= 1]


def _check_open(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ConfigError(f"no Ray cluster at {address}: {error}") from error


def wait_for_loss(address: str, ended: threading.Event) -> bool:
    """Wait until Ray's head does not accept connections for long; False if the cluster has ended before.

    Ray ends all of its processes a short time later.
    """
    patience = float(os.environ.get(RECONNECT_VARIABLE, 60)) - ORDERLY_END_SECONDS
    reached = time.monotonic()
    while not ended.wait(WATCH_SECONDS):
        try:
            _check_open(address)
            reached = time.monotonic()
        except ConfigError as error:
            if getattr(error.__cause__, "errno", 0) in (errno.EMFILE, errno.ENFILE):  # this process's own trouble
                reached = time.monotonic()
            if time.monotonic() - reached > patience:
                log.error("Ray's head has not answered for %.0f s, the cluster ends: %s", patience, error)
                return True
    return False


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
        self._commands: list[tuple[Any, ...]] = []
        self._state: dict[str, Any] = {}

    def post(self, command: tuple[Any, ...]) -> None:
        self._commands.append(command)

    def exchange(self, state: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Replace the state; return the commands, each once."""
        self._state, commands = state, self._commands
        self._commands = []
        return commands

    def state(self) -> dict[str, Any]:
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

    def exchange(self, state: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Show a state, and return the commands that came since; none if Ray does not reach the mailbox now."""
        try:
            commands: list[tuple[Any, ...]] = ray.get(self._actor.exchange.remote(state))
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
