"""A server of our own on a free port of this machine, for as long as it is needed."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.errors import HeadwaterError

PATIENCE = 15.0  # seconds that it has to stop in order
SAID = 5  # of its last lines, where it did not start
LISTENS = re.compile(r"serves .* on (http://\S+)")


@contextmanager
def own_server(model: Path | None, memory: str) -> Iterator[str]:
    """The URL of `headwater serve` once it listens; stopped at the end. Raises HeadwaterError if it ends before."""
    command = [sys.executable, "-m", "headwater", "serve", *([str(model)] if model else [])]
    command += ["--host", "127.0.0.1", "--port", "0", "--memory", memory]
    command += ["--healing", "off"]  # or what was composed for one item could be exact for the next
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            found = (LISTENS.search(line) for line in process.stdout)
            listens = next((match for match in found if match), None)
            if listens is None:
                log.seek(0)
                said = "; ".join(log.read().strip().splitlines()[-SAID:])
                raise HeadwaterError(f"the server ended with exit code {process.wait()}: {said}")
            yield listens[1]
        finally:
            process.terminate()
            try:
                process.wait(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
