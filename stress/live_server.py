"""A server in this process, on a real socket: so the traffic is real, and its insides can be looked at."""

from __future__ import annotations

import ctypes
import gc
import socket
import threading
from pathlib import Path

import uvicorn

from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from headwater.engine.proof.selfcheck import SelfCheck
from headwater.engine.proof.verdict import verdict
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.files import embedded
from headwater.models.load import LoadedModel, load_model, read_spec
from headwater.server.app import create_app
from headwater.server.http.process import protocol_settings
from headwater.tiers.disk import DiskStore
from headwater.tiers.fingerprint import Fingerprint

PATIENCE = 60  # seconds after which something that must happen has not
TIER_PAGES = 600  # of a tier's size


def embedded_model(
    dtype: str = "auto", weights: str = "auto", threads: int = 2, device: str = "cpu"
) -> tuple[LoadedModel, SelfCheck]:
    """Load the embedded model, and return the verdict of the self-check, a kept one if there is one.

    On a CPU it has its head.
    """
    prepare_process(threads)
    check = verdict(read_spec(embedded(), dtype, device, weights=weights), device)
    numerics.use(Numerics(check.mode))
    return load_model(embedded(), dtype, device, weights=weights, mtp=device == "cpu"), check


class LiveServer:
    """An engine and its API on a loopback port; `with` starts and stops both."""

    def __init__(
        self, loaded: LoadedModel, check: SelfCheck, pages: int, tier: Path | None = None, **settings: object
    ) -> None:
        """`tier`: a folder in which every checkpoint is stored, and from which all that is there is loaded."""
        config = ServeConfig(memory=pages * loaded.spec.page_bytes, **settings)
        self.engine = Engine.over(loaded, check, config)
        if tier is not None:
            store = DiskStore(tier, TIER_PAGES * loaded.spec.page_bytes)
            config = ServeConfig(tier=("disk:",), tier_store="through")
            self.engine.use_tiers([store], bytes(32), Fingerprint.of({}), config)
            self.engine.scheduler.tiers.prefill_seconds = float  # type: ignore[attr-defined]  # reading always wins
        self.app = create_app(self.engine, config)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._socket.getsockname()[1]
        self._uvicorn = uvicorn.Server(protocol_settings(self.app, config))
        self._thread = threading.Thread(target=self._uvicorn.run, args=([self._socket],), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> LiveServer:
        self.engine.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._uvicorn.should_exit = True
        self._thread.join()
        self.engine.stop()
        self._socket.close()

    def check(self) -> None:
        """Verify every invariant of the cache, between two steps. Raises AssertionError."""
        with self.engine.changed:
            self.engine.scheduler.cache.check()

    def check_idle(self) -> None:
        """Nothing runs, waits or is held once all is done. Raises AssertionError that says what is."""
        assert self.engine.drain(PATIENCE), f"not idle after {PATIENCE} s: {self.engine.stats()}"
        with self.engine.changed:
            assert self.engine.changed.wait_for(lambda: not self.engine.scheduler.tiers.busy, PATIENCE), (
                "tiers are busy"
            )
        self.check()
        stats = self.engine.stats()
        held = {
            "running": stats.running,
            "waiting": stats.waiting,
            "leases": stats.cache.leases,
            "open plans": stats.cache.open_plans,
            "private pages": stats.cache.pages_private,
            "slot pages": stats.cache.pages_slot,
        }
        assert not any(held.values()), f"held without an owner: {held}"
        pages = stats.cache.pages_by_use()
        assert sum(pages.values()) == stats.cache.pages_total, f"pages do not add up: {pages}"
        assert self.engine.health()["status"] == "ok", self.engine.health()


def resident_bytes() -> int:
    """Return the resident memory of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def release_free_memory() -> None:
    """Return free memory of the allocator to the system, so that resident memory is the used memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
