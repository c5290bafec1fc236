"""`headwater` commands as processes of their own, forked from one in which everything is imported but nothing computed.

Such a process has its own threads, signals, output and exit code, without two or three seconds of importing torch.
`test_serve.py` starts the interpreter itself.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from typing import TextIO, TypeVar

PATIENCE = 120  # seconds after which a process that must have ended has not
IMPORTED = [
    __name__, "headwater.cli.serve", "headwater.cli.tiers", "headwater.engine.engine", "headwater.engine.proof.verdict",
    "headwater.kernels.sampling", "headwater.mixers.panels", "headwater.server.app", "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
]  # fmt: skip


Process = TypeVar("Process", "Forked", "subprocess.Popen[str]")


class Forked:
    """A running command; what tests use of `subprocess.Popen`, with text pipes for both of its outputs."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        pipes = [os.pipe() for _ in "12"]
        ends = [Connection(write, readable=False) for _, write in pipes]
        given = arguments, {**os.environ, **variables}, os.getcwd()
        self._process = context.Process(target=_run, args=(*given, *ends), daemon=True)
        self._process.start()
        for end in ends:
            end.close()
        self.stdout, self.stderr = (os.fdopen(read, encoding="utf-8") for read, _ in pipes)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("headwater", timeout or 0)
        return self.returncode

    def communicate(self, timeout: float = PATIENCE) -> tuple[str, str]:
        """Return the rest of both outputs, once the process has ended."""
        with ThreadPoolExecutor(2) as readers:
            outputs = [readers.submit(_rest, file) for file in (self.stdout, self.stderr)]
            try:
                out, err = (output.result(timeout) for output in outputs)
            except TimeoutError:
                self.kill()
                raise
        self.wait(timeout)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def headwater(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    with Forked(*arguments, **variables) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(arguments, process.wait(), out, err)


def serving(*flags: str, **variables: str) -> AbstractContextManager[tuple[Forked, list[str]]]:
    """A server's process, once it listens, and the lines that it said."""
    return listening(Forked("serve", "--memory", "200MB", *flags, **variables))


@contextmanager
def listening(process: Process) -> Iterator[tuple[Process, list[str]]]:
    """The process of a server, once it listens, and the lines that it said; it is killed at the end."""
    with process:
        try:
            said: list[str] = []
            while not said or not said[-1].startswith("Deterministic: "):
                said.append(process.stdout.readline())
                assert said[-1], process.communicate()
            yield process, said
        finally:
            process.kill()


def address(said: Sequence[str]) -> str:
    """The URL that a server said."""
    return re.search(r"https?://127\.0\.0\.1:\d+/v1", "".join(said))[0]


def _rest(file: TextIO) -> str:
    return file.read()


def _run(
    arguments: tuple[str, ...], environment: dict[str, str], folder: str, out: Connection, err: Connection
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for end, number in ((out, 1), (err, 2)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.argv = ["headwater", *arguments]
    try:
        runpy.run_module("headwater", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # a forked process leaves them out
