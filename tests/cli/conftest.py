"""A server of the embedded model that several files of tests share."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.forked import address, serving


@contextmanager
def real_server(*options: str) -> Iterator[str]:
    """The URL of `headwater serve` on a free port, until the end; SIGTERM lets it write what it records."""
    with serving("--port", "0", *options) as (process, said):
        threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop the server
        yield address(said).removesuffix("/v1")
        process.terminate()
        process.wait(timeout=20)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the shared server records its traffic to."""
    return tmp_path_factory.mktemp("recorded") / "traffic.trace"


@pytest.fixture(scope="session")
def url(recorded: Path) -> Iterator[str]:
    with real_server("--record", str(recorded)) as url:
        yield url


@pytest.fixture(autouse=True)
def logging_stays_as_it_was() -> Iterator[None]:
    """`headwater serve` sets up logging before it refuses a socket: its handler would outlive the captured stderr."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = [one for one in root.handlers if one in handlers]
    root.setLevel(level)
