"""One worker in this process: an engine, its KV events, and the socket on which it answers routers."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from headwater.cluster.cost import Role
from headwater.cluster.encryption import CurveServer, KeyPair, WorkerKeys
from headwater.cluster.publisher import Publishing
from headwater.cluster.pulling import Pulling, own_security
from headwater.cluster.sockets import Contact
from headwater.cluster.wire import NO_CONTACT, WorkerInfo
from headwater.cluster.worker import NO_POOL, Pool, Prepares, Worker
from headwater.config import ServeConfig
from headwater.errors import ConfigError
from headwater.server.observe.logs import configure_logging, log_worker_end

if TYPE_CHECKING:
    from headwater.engine.engine import Engine

IDLE_POLL_SECONDS = 0.05  # between checks whether a draining worker is idle


def pulls(config: ServeConfig) -> bool:
    """Return whether workers with these settings pull prefixes from each other."""
    return config.cache and config.decode_reuse != "raw"


def prepares(engine: Engine) -> Prepares:
    """Let an engine prepare segments, after what it does at each step already; return what a worker calls for it."""
    preparations = engine.preparations()
    engine.stepped = preparations.after(engine.stepped)
    return preparations.prepare


def info_of(
    engine: Engine,
    fingerprint: str,
    max_running: int,
    addresses: tuple[str, str],
    parts: Contact = NO_CONTACT,
    role: Role = Role.BOTH,
) -> WorkerInfo:
    """Return the info of a worker with this engine, whose KV events are at these addresses (empty: it has none).

    `parts`: from which other workers pull prefixes.
    """
    return WorkerInfo(
        fingerprint=fingerprint,
        process=os.getpid(),
        model=engine.model_name,
        max_model_len=engine.max_model_len,
        max_running=max_running,
        unit_bytes=engine.scheduler.layout.unit_bytes,
        live=addresses[0],
        replay=addresses[1],
        health=engine.health(),
        parts=parts,
        role=role,
        draft_bytes=engine.draft_bytes,
        mtp_bytes=engine.mtp_bytes,
    )


def worker_config(config: ServeConfig, workers: int, threads: int) -> ServeConfig:
    """Return the settings of one of a host's `workers` workers. Hosts may be others than this one.

    They have no secrets and files of the HTTP server: workers do not need them, and other hosts do not have them.
    """
    return replace(
        config,
        memory=config.memory // workers,
        threads=threads,
        api_key=None,
        api_key_file=None,
        tls_cert=None,
        tls_key=None,
        record=None,
    )


def refuse_inexact(broken_by: str | None, config: ServeConfig) -> None:
    """Raise ConfigError if answers may depend on the worker that computes them, and the settings do not allow that.

    `broken_by`: the kernel that the self-check found, if any.
    """
    if config.reproducible and broken_by is not None:
        others = "with --no-reproducible workers are taken whose answers may differ in their last bits"
        raise ConfigError(f"the self-check of a worker's kernels says no: {broken_by}; {others}")


class Host:
    """A worker with an engine of its own, from its settings to its end."""

    def __init__(
        self,
        config: ServeConfig,
        keys: WorkerKeys,
        own_address: Callable[[], str],
        *,
        share_weights: bool,
        role: Role = Role.BOTH,
    ) -> None:
        """Load the model and listen on any ports of this host's own address.

        `share_weights`: with other workers of this host. Raises CheckpointError, ConfigError (also if the self-check
        says no) or ZMQError.
        """
        from headwater.engine.engine import Engine  # needs torch, which no other part of a cluster does
        from headwater.engine.proof.fingerprint import fingerprint, probe

        configure_logging(config.log_format, config.log_level)
        anywhere = f"tcp://{own_address()}:*"
        config = replace(
            config, kv_events=config.cache, kv_events_endpoint=anywhere, kv_events_replay_endpoint=anywhere
        )
        server = CurveServer(KeyPair.new(), [keys.router])
        self._publishing = Publishing(config, keys.digests, server) if config.cache else None
        self._engine = engine = Engine.load(config, share_weights=share_weights)
        refuse_inexact(engine.check.broken_by, config)
        probed = probe(engine.loaded)
        own = fingerprint(engine.loaded, engine.loaded.path, engine.check.mode, probed)
        incarnation = uuid.uuid4().bytes
        self._pulling = None
        if pulls(config):
            given = keys.digests, own, config, incarnation, anywhere, own_security()
            self._pulling = Pulling(engine, *given)
        engine.note_probe(probed)
        addresses = self._publishing.addresses if self._publishing else ("", "")
        if self._publishing is not None:
            engine.stepped = self._publishing.start(engine.scheduler.cache, engine.own_tiers)
        parts, pool = NO_CONTACT, NO_POOL
        if self._pulling is not None:
            parts, pool = self._pulling.contact, Pool(self._pulling.know, prepares(engine))
            self._pulling.start()
        ended = partial(log_worker_end, config.log_requests)
        info = info_of(engine, own.digest, config.max_running, addresses, parts, role)
        self._worker = Worker(engine, info, incarnation, anywhere, server=server, pool=pool, ended=ended)
        self._ended = threading.Event()
        engine.start()
        self._worker.start()

    def contact(self) -> Contact:
        """Return the address of its socket, and its public key."""
        return self._worker.contact

    def wait(self) -> None:
        """Return when it was stopped."""
        self._ended.wait()

    def stop(self, seconds: float = 0.0) -> None:
        """End it, after its requests have ended or `seconds` have passed."""
        end = time.monotonic() + seconds
        while self._worker.open_requests and time.monotonic() < end:
            time.sleep(IDLE_POLL_SECONDS)
        self._engine.stop(lambda: max(0.0, end - time.monotonic()))
        self._worker.close()
        if self._pulling is not None:
            self._pulling.close()
        if self._publishing is not None:
            self._publishing.close()
        self._ended.set()
