"""A Redis server of the tests' own, on loopback."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

BINARIES = ("redis-server", "valkey-server")


@dataclass
class RedisServer:
    """A process, and where it listens."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def redis_server(folder: Path, *options: str, port: int | None = None) -> Iterator[RedisServer]:
    """Start a server without files of its own; it is ended with the block."""
    pytest.importorskip("redis", reason="redis-py is not installed")
    import redis

    binary = next(filter(None, map(shutil.which, BINARIES)), None)
    if binary is None:
        pytest.skip(f"needs one of {', '.join(BINARIES)}")
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        password = options[options.index("--requirepass") + 1] if "--requirepass" in options else None
        with redis.Redis(port=port, password=password) as client:
            for _ in range(200):
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    time.sleep(0.05)
            else:
                raise AssertionError("the Redis server does not answer")
        yield RedisServer(port, process)
    finally:
        process.kill()
        process.wait()
