"""Several routers, each in a process of its own: all accept from one socket, and one that ends is started again.

Its answers break; those of the others do not. What it knew it learns from the workers.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

from headwater.cluster.encryption import RouterKeys
from headwater.cluster.sockets import Contact
from headwater.config import ServeConfig

POLL_SECONDS = 0.05  # between checks of the routers
MIN_RESTART_SECONDS = 1.0  # from a router's start to that of its successor
END_SECONDS = 5.0  # for a router to end after its time to drain

log = logging.getLogger("headwater.cluster")


@dataclass(frozen=True)
class Given:
    """Arguments of a router's process."""

    config: ServeConfig
    keys: RouterKeys
    rule: str
    family: int
    listening: Any  # the socket's descriptor, as a child process is given it


Routes = Callable[[Given, Connection], None]


@dataclass(eq=False)
class Child:
    """A router's process, and what it said last."""

    process: Any
    pipe: Connection
    health: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)


class RouterProcesses:
    """Routers in processes, as many as are wanted; for workers they are one."""

    def __init__(
        self, routes: Routes, wanted: int, sock: socket.socket, config: ServeConfig, keys: RouterKeys, rule: str
    ) -> None:
        """`routes` is what each process runs; `sock` is bound, and listens."""
        self._routes, self._wanted, self._sock = routes, wanted, sock
        self.config, self._keys, self._rule = config, keys, rule  # of routers that are started from now on
        self._children: list[Child] = []
        self._contacts: dict[str, Contact] = {}  # of workers
        self._draining: set[str] = set()
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-routers", daemon=True)
        self.lost: Callable[[str], None] = lambda name: None  # called with each worker that a router lost

    def start(self) -> None:
        """Start the routers, and keep their number."""
        with self._lock:
            self._children = [self._started() for _ in range(self._wanted)]
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Let the routers end after their open requests, or after `seconds`."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        for child in self._children:
            child.process.terminate()
        end = time.monotonic() + seconds + END_SECONDS
        for child in self._children:
            child.process.join(max(0.0, end - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
            child.pipe.close()

    def renew(self) -> None:
        """Let every router read its keys and its certificate again."""
        with self._lock:
            for child in self._children:
                os.kill(child.process.pid, signal.SIGHUP)

    # -- workers

    def join(self, name: str, contact: Contact) -> None:
        """Let every router know a worker; one that knows it already does nothing."""
        with self._lock:
            self._contacts[name] = contact
            self._tell("join", name, contact)

    def drain(self, name: str) -> None:
        """Let no router give a worker more requests."""
        with self._lock:
            self._draining.add(name)
            self._tell("drain", name)

    def leave(self, name: str) -> None:
        """Let every router forget a worker."""
        with self._lock:
            self._contacts.pop(name, None)
            self._draining.discard(name)
            self._tell("leave", name)

    def is_idle(self, name: str) -> bool:
        """Return whether a worker drains, and has no router's requests."""
        return all(one is not None and one["drained"] for one in self._seen(name))

    def serves(self, name: str) -> bool:
        """Return whether every router gives a worker requests."""
        return all(one is not None and one["state"] == "up" for one in self._seen(name))

    def _seen(self, name: str) -> list[dict[str, Any] | None]:
        """Return each router's report of a worker; None: it does not know it."""
        with self._lock:
            shown = [child.health.get("workers", ()) for child in self._children]
        return [next((one for one in workers if one["name"] == name), None) for workers in shown]

    def wait_for(self, workers: int, seconds: float) -> bool:
        """Wait until every router knows `workers` workers; False if they do not within `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._lock:
                known = [self._known(child) for child in self._children]
            if min(known) >= workers:
                return True
            time.sleep(POLL_SECONDS)
        return False

    @staticmethod
    def _known(child: Child) -> int:
        return sum(one["state"] != "joining" for one in child.health.get("workers", ()))

    def health(self) -> dict[str, Any]:
        """Return the first router's /health."""
        with self._lock:
            return self._children[0].health

    def state(self) -> dict[str, Any]:
        """Return the workers, and the outcomes of all routers' requests."""
        with self._lock:
            states = [child.health for child in self._children if child.health]
            routers = [child.process.pid for child in self._children]
        if not states:
            return {}
        workers = {one["name"]: {**one, "open": 0, "answered": 0} for state in states for one in state["workers"]}
        counts = Counter[str]()
        for state in states:
            counts.update(state["requests"])
            for one in state["workers"]:
                for count in ("open", "answered"):
                    workers[one["name"]][count] += one[count]
        return {"workers": list(workers.values()), "requests": dict(counts), "routers": routers}

    # -- processes

    def _tell(self, *command: object) -> None:
        with self._lock:
            for child in self._children:
                with suppress(OSError):  # it has ended, and its successor gets everything
                    child.pipe.send(command)

    def _started(self) -> Child:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        context = multiprocessing.get_context("spawn")
        given = Given(self.config, self._keys, self._rule, self._sock.family, _Descriptor(self._sock.fileno()))
        process = context.Process(target=self._routes, args=(given, theirs), name="headwater-router")
        process.start()
        theirs.close()
        for name, contact in self._contacts.items():
            ours.send(("join", name, contact))
        for name in self._draining:
            ours.send(("drain", name))
        return Child(process, ours)

    def _run(self) -> None:
        while not self._stopping.wait(POLL_SECONDS):
            with self._lock:
                for number, child in enumerate(self._children):
                    self._listen(child)
                    if not child.process.is_alive() and time.monotonic() - child.began > MIN_RESTART_SECONDS:
                        code = child.process.exitcode
                        log.warning("router %d ended with %s, another one is started", child.process.pid, code)
                        child.pipe.close()
                        self._children[number] = self._started()

    def _listen(self, child: Child) -> None:
        with suppress(OSError, EOFError):
            while child.pipe.poll():
                kind, what = child.pipe.recv()
                if kind == "lost":
                    self.lost(what)
                else:
                    child.health = what


class _Descriptor:
    """A descriptor that a child process gets a copy of."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (DupFd(self.number),)


def _detached(passed: Any) -> int:
    number: int = passed.detach()
    return number
