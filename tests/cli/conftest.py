"""A server of the embedded model that several files of tests share."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def real_server(*options: str) -> Iterator[str]:
    """The URL of `headwater serve` on a free port, until the end; SIGTERM lets it write what it records."""
    command = [sys.executable, "-m", "headwater", "serve", "--port", "0", "--memory", "200MB", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in process.stdout)
            yield next(match[0] for match in found if match)
            process.terminate()
            process.wait(timeout=20)
        finally:
            process.kill()


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
