"""One server for all clients, a proxy that notes what they look for outside, and the table of results."""

from __future__ import annotations

import io
import re
import shutil
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
from rich.console import Console

from headwater.models.files import embedded
from headwater.table import Table
from tests.forked import Forked, address, listening
from tests.server.templates import GUARDS

COLUMNS = 80
RESULTS = pytest.StashKey[list[tuple[str, ...]]]()


class Server:
    """A running `headwater serve` over the embedded model, with its counters."""

    def __init__(self, url: str) -> None:
        self.url = url

    def cached_tokens(self) -> int:
        return sum(self._count(r"headwater_cached_tokens_total"))

    def failed(self) -> int:
        """Requests that ended with a 500, or 502 to 504."""
        return sum(self._count(r'headwater_requests_total\{.*outcome="(?:failed|unavailable)".*\}'))

    def _count(self, name: str) -> Iterator[int]:
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        return (int(float(value)) for value in re.findall(rf"^{name} (\S+)$", text, re.M))


class Outside:
    """A proxy that lets nothing through and keeps the names of the hosts that it was asked for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._refuse, daemon=True).start()

    def _refuse(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                words = connection.recv(4096).split()
                if len(words) > 1:
                    self.asked.add(re.sub(r"^\w+://|[:/].*$", "", words[1].decode()))
                connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the embedded model, whose template raises on odd turns here, as those of served families do."""
    folder = tmp_path_factory.mktemp("strict") / embedded().name
    shutil.copytree(embedded(), folder)
    template = folder / "chat_template.jinja"
    template.write_text(GUARDS + template.read_text(encoding="utf-8"), encoding="utf-8")
    with listening(Forked("serve", str(folder), "--memory", "400MB", "--port", "0")) as (process, said):
        threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop the server
        yield Server(address(said).removesuffix("/v1"))


@pytest.fixture
def outside() -> Iterator[Outside]:
    proxy = Outside()
    yield proxy
    proxy.close()


@pytest.fixture
def result(pytestconfig: pytest.Config) -> list[tuple[str, ...]]:
    """Rows of the table that is printed at the end: client, version, what it did and which hosts it looked for."""
    return pytestconfig.stash.setdefault(RESULTS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(RESULTS, [])
    if rows:
        terminalreporter.write(printed(rows))


def printed(rows: list[tuple[str, ...]]) -> str:
    """Return the table of results, 80 columns wide."""
    table = Table("Clients", ("client", "version"), (), ("did",))
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=COLUMNS).print(table)
    return out.getvalue()
