"""A cluster whose disk is full: answers are undisturbed, also those whose worker is killed meanwhile.

Longer checks, `make test-cluster`: a tier is on a file system of a few megabytes, which needs root to be mounted.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from headwater.models.files import embedded
from tests.forked import address, serving
from tests.test_cluster_serve import PATIENCE, Running, until, up

pytestmark = pytest.mark.full

PROMPTS = [f"{n} " + "the tide comes in " * 300 for n in range(12)]  # of 1,500 tokens: a state, and KV
TOKENS, AT_ONCE = 60, 4
NO_SPACE = "No space left on device"


@contextmanager
def disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a file system of that size on a folder."""
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "headwater", str(folder)]
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"nothing can be mounted here: {getattr(error, 'stderr', error)}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def of_one_server() -> list[list[tuple[str, float]]]:
    """Return the answers of a server without a cluster and without a tier."""
    with serving("--port", "0", "--threads", "1") as (process, said):
        alone = Running(process, address(said), "", said, Path())
        return [alone.story(TOKENS, prompt=prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(("size", "is_full"), [("4m", True), ("500m", False)], ids=["full", "with room"])
def test_answers_are_undisturbed_if_the_disk_is_full(tmp_path: Path, size: str, is_full: bool) -> None:
    folder, alone = tmp_path / "disk", of_one_server()
    folder.mkdir()
    tier = "--tier", f"disk:{folder},size=10GB", "--tier-key", str(tmp_path / "key"), "--tier-store", "through"
    with disk(folder, size), up(tmp_path, str(embedded()), *tier) as running, ThreadPoolExecutor(AT_ONCE) as clients:
        until(lambda: len(running.ups()) == 2)
        asked = [clients.submit(running.story, TOKENS, prompt=prompt) for prompt in PROMPTS * 2]
        until(lambda: sum(one.done() for one in asked) >= len(PROMPTS))
        until(lambda: any(one["open"] for one in running.workers().values()))
        workers = running.workers()
        os.kill(max(workers.values(), key=lambda one: one["open"])["process"], signal.SIGKILL)
        answers = [one.result(PATIENCE) for one in asked]
        counts = running.counts()
        until(lambda: len(running.ups()) == 2)
        later = [running.story(TOKENS, prompt=prompt) for prompt in PROMPTS]
        left = os.statvfs(folder)
        parts = sum(path.is_file() for path in folder.rglob("*"))
    print(f"\n{size}: {parts} files, {left.f_bavail * left.f_bsize:,} bytes left, {counts}")
    assert answers == alone * 2
    assert later == alone
    assert counts["routed"] == counts["answered"] == len(asked)
    assert "failed" not in counts
    assert parts > 0
    assert any(NO_SPACE in line for line in running.said) == is_full
