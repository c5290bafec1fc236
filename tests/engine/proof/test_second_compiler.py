"""The second process at a first start: it compiles, ends with the self-check, and is not there at later starts."""

import io
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from headwater import kernels
from headwater.engine.proof import second_compiler, selfcheck
from headwater.engine.proof.second_compiler import compiling_beside
from headwater.models.files import embedded
from headwater.models.load import read_spec

PATIENCE = 120  # seconds after which something that must happen has not
pytestmark = pytest.mark.skipif(not kernels.available(), reason="kernels need numba")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Processes that were started."""
    processes: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return processes


def test_second_process_compiles_into_an_empty_folder_and_ends_with_the_block(
    tmp_path: Path, monkeypatch, started
) -> None:
    from headwater.kernels import compiling

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "_KEEPS", True)
    spec = read_spec(embedded(), "float32")
    deadline = time.monotonic() + PATIENCE
    with compiling_beside(spec, "cpu"):
        while not list(tmp_path.rglob("*.nbi")):
            assert time.monotonic() < deadline
            assert started[0].poll() is None
            time.sleep(0.05)
    assert started[0].returncode is not None
    with compiling_beside(spec, "cpu"):  # now there are compiled kernels
        pass
    assert len(started) == 1


def test_on_a_gpu_there_is_none(monkeypatch, started) -> None:
    monkeypatch.setattr(second_compiler, "_is_first_start", lambda: True)
    with compiling_beside(read_spec(embedded(), "float32"), "cuda"):
        pass
    assert not started


@pytest.mark.parametrize("program", ["/no/such/python", "/bin/false"])
def test_start_continues_without_the_second_process(monkeypatch, program) -> None:
    monkeypatch.setattr(second_compiler, "_is_first_start", lambda: True)
    monkeypatch.setattr(sys, "executable", program)
    reached = False
    with compiling_beside(read_spec(embedded(), "float32"), "cpu"):
        reached = True
    assert reached


def test_second_process_stops_when_its_parent_ends(monkeypatch) -> None:
    done: list[object] = []

    def checks(spec):
        for number in range(5):
            done.append((spec, number))
            yield

    parents = iter([7, 7, 1])
    monkeypatch.setattr(selfcheck, "last_checks_first", checks)
    monkeypatch.setattr(second_compiler, "prepare_process", lambda threads: None)
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pickle.dumps("a model"))))
    second_compiler.main()
    assert done == [("a model", 0), ("a model", 1)]
