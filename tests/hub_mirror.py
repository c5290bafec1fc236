"""A hub on this machine: models from folders, by the part of the hub's API that a download uses.

It answers `/api/models/ORG/NAME/revision/REVISION` and `/ORG/NAME/resolve/REVISION/FILE`, the latter with ETag,
X-Repo-Commit and ranges. It logs every request, and can refuse or cut answers.
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

LARGE = 2_000  # bytes from which on a file has a SHA-256 in the listing, as files of Git LFS have

Refusal = tuple[int, dict[str, str]]  # status and headers


@dataclass
class HubModel:
    """A model of the mirror: its files, and its revisions with their commits."""

    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": "a" * 40})


@dataclass(frozen=True)
class Asked:
    """A request that was answered: `first` is the first byte of its range."""

    method: str
    path: str
    status: int
    first: int = 0
    token: str | None = None


class Mirror:
    """The server. `refuse` gives the refusal of a path, or None; `cut` the bytes after which an answer breaks off."""

    def __init__(self) -> None:
        self.models: dict[str, HubModel] = {}
        self.log: list[Asked] = []
        self.refuse: Callable[[str], Refusal | None] = lambda path: None
        self.cut: Callable[[str], int | None] = lambda path: None
        self.ranges = True
        self.pause: int | None = None  # bytes of an answer after which it waits, once, for `resumed`
        self.paused, self.resumed = threading.Event(), threading.Event()
        self.url = ""

    def add(self, name: str, files: Mapping[str, bytes]) -> None:
        """Add a model, or replace it."""
        self.models[name] = HubModel(dict(files))

    def asked(self, file: str, method: str = "GET") -> list[Asked]:
        """Return the requests for a file, in order."""
        return [one for one in self.log if one.method == method and one.path.endswith(f"/{file}")]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def etag(content: bytes) -> str:
    """Return what the hub's ETag holds: the SHA-256 of a large file, and another hash of a small one."""
    return sha256(content) if len(content) >= LARGE else hashlib.sha1(content).hexdigest()


def listed(name: str, content: bytes) -> dict[str, object]:
    """Return the entry of a file in the listing of a model."""
    entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": etag(content)}
    if len(content) >= LARGE:
        entry["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 134}
    return entry


class Handler(BaseHTTPRequestHandler):
    """Answers of the mirror, which is an attribute of the server."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing: the mirror keeps its own log."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        refusal = self.mirror.refuse(path)
        if refusal is not None:
            self.send(*refusal)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            self.send_listing(found[1], found[2])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.send_file(found[1], found[2], found[3])
        else:
            self.send(404, {})

    @property
    def mirror(self) -> Mirror:
        return self.server.mirror  # type: ignore[attr-defined]

    def model(self, name: str, revision: str) -> tuple[HubModel, str] | None:
        """Return a model and the commit of its revision; send the hub's refusal and return None if there is none."""
        model = self.mirror.models.get(name)
        if model is None:
            self.send(401, {"X-Error-Message": "Invalid username or password."})
            return None
        commit = revision if revision in model.revisions.values() else model.revisions.get(revision)
        if commit is None:
            self.send(404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return model, commit

    def send_listing(self, name: str, revision: str) -> None:
        found = self.model(name, revision)
        if found is not None:
            model, commit = found
            siblings = [listed(file, content) for file, content in model.files.items()]
            document = {"id": name, "modelId": name, "sha": commit, "siblings": siblings}
            self.send(200, {"Content-Type": "application/json"}, json.dumps(document).encode())

    def send_file(self, name: str, revision: str, file: str) -> None:
        found = self.model(name, revision)
        if found is None:
            return
        model, commit = found
        if file not in model.files:
            self.send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        content = model.files[file]
        headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": commit}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if self.mirror.ranges else None
        first = int(wanted[1]) if wanted else 0
        end = min(int(wanted[2]) + 1, len(content)) if wanted and wanted[2] else len(content)
        if wanted:
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
        self.send(206 if wanted else 200, headers, content[first:end], first)

    def send(self, status: int, headers: dict[str, str], body: bytes = b"", first: int = 0) -> None:
        """Answer, but at most as many bytes as the mirror's `cut` allows, after which the connection is closed."""
        path = unquote(self.path.partition("?")[0])
        self.mirror.log.append(Asked(self.command, path, status, first, self.headers.get("Authorization")))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut, whole = self.mirror.cut(path), len(body)
        body, pause = body[:cut], self.mirror.pause
        if pause is not None and pause < len(body):
            self.mirror.pause = None
            self.wfile.write(body[:pause])
            self.mirror.paused.set()
            self.mirror.resumed.wait()
            body = body[pause:]
        self.wfile.write(body)
        self.close_connection = cut is not None and cut < whole


@contextmanager
def mirror() -> Iterator[Mirror]:
    """Run a mirror on a free port."""
    found = Mirror()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.mirror = found  # type: ignore[attr-defined]
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.resumed.set()
        server.shutdown()
        server.server_close()
