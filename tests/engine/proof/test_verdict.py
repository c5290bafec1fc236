"""Verdicts of the self-check: which are kept, for which keys, and in which folder."""

import json
import logging
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater import machine
from headwater.cache_folder import cache_folder
from headwater.engine.proof import verdict as verdicts
from headwater.engine.proof.selfcheck import SelfCheck, self_check
from headwater.engine.proof.verdict import MAX_VERDICT_FILES, key_of, verdict
from tests.engine.proof.test_selfcheck import latent_spec, spec
from tests.processors import AVX2, AVX512, pretend

YES = SelfCheck(True, None, "compiled")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of verdicts, which is not there yet."""
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path / "home" / "cache"))
    return tmp_path / "home" / "cache"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data types that were checked, each with a yes."""
    done: list[str] = []

    def check(spec: Any, *given: Any, **more: Any) -> SelfCheck:
        done.append(spec.dtype_name)
        return YES

    monkeypatch.setattr(verdicts, "self_check", check)
    return done


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_a_yes_is_kept_with_its_time_and_found_again(folder: Path, checks: list[str]) -> None:
    first, again = verdict(spec()), verdict(spec())
    assert checks == ["float32"]
    assert first == again
    assert first.deterministic
    assert first.proven is not None
    assert first.proven.utcoffset() is not None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (file,) = files(folder)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text())["key"] == key_of(spec())


def test_a_no_is_never_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "self_check", lambda *a, **b: SelfCheck(False, "silu at 3 rows", "tiled"))
    assert verdict(spec()).proven is None
    assert not folder.exists() or not files(folder)
    assert verdict(spec(), reproducible=False).proven is None


def test_recheck_proves_again_and_keeps_that(folder: Path, checks: list[str]) -> None:
    for _ in range(2):
        verdict(spec(), recheck=True)
    assert len(checks) == 2
    assert len(files(folder)) == 1


def test_a_changed_thread_count_proves_again(folder: Path) -> None:
    """With the real check: the verdict of two threads says nothing of one, and each is kept."""
    before = torch.get_num_threads()
    checks: list[list[int]] = []
    try:
        for threads in (2, 1, 2, 1):
            torch.set_num_threads(threads)
            checks.append([])
            assert verdict(spec(), progress=lambda done, total: checks[-1].append(done)).deterministic
    finally:
        torch.set_num_threads(before)
    assert [bool(done) for done in checks] == [True, True, False, False]
    assert len(files(folder)) == 2


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Path], Any]] = {
    "variable": lambda patch, path: patch.setenv("MKL_CBWR", "COMPATIBLE"),
    "instructions": lambda patch, path: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
    "affinity": lambda patch, path: patch.setattr(machine, "affinity", lambda: (7,)),
    "processor": lambda patch, path: pretend(patch, AVX512 if machine.cpu() == AVX2 else AVX2),
    "microcode": lambda patch, path: patch.setattr(machine, "identity", lambda: ["microcode : 0x1"]),
    "versions": lambda patch, path: patch.setattr(machine, "versions", lambda *names: dict.fromkeys(names, "9.9")),
    "torch": lambda patch, path: patch.setattr(torch, "__version__", "9.9"),
    "code": lambda patch, path: patch.setattr(verdicts, "PACKAGE", path),
}


@pytest.mark.parametrize("what", CHANGES)
def test_key_has_everything_that_kernels_depend_on(
    folder: Path, checks: list[str], what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verdict(spec())
    with monkeypatch.context() as patch:
        CHANGES[what](patch, tmp_path)
        verdict(spec())
    verdict(spec())
    assert len(checks) == 2


def test_shapes_and_data_type_are_in_the_key(folder: Path, checks: list[str]) -> None:
    models = (spec(), spec("bfloat16"), latent_spec(), replace(spec(), vocab_size=400), replace(spec(), tied=False))
    for model in (*models, *models):
        verdict(model)
    assert len(checks) == len(models)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HEADWATER_CACHE_DIR": "/own", "CACHE_DIRECTORY": "/service", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"CACHE_DIRECTORY": "/service", "XDG_CACHE_HOME": "/xdg"}, "/service"),
        ({"CACHE_DIRECTORY": "/service:/other"}, "/service"),
        ({"HEADWATER_CACHE_DIR": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/headwater"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/headwater"),
        ({}, "/home/me/.cache/headwater"),
        ({"HEADWATER_CACHE_DIR": "~/mine"}, "/home/me/mine"),
    ],
)
def test_the_folder_is_the_own_one_or_systemds_or_xdgs(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert str(cache_folder(environment)) == expected


def world_writable(folder: Path, patch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def of_another(folder: Path, patch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    patch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)


def a_file(folder: Path, patch: pytest.MonkeyPatch) -> None:
    folder.parent.mkdir()
    folder.write_text("")


def nowhere(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HEADWATER_CACHE_DIR", "/proc/nowhere/headwater")


def homeless(folder: Path, patch: pytest.MonkeyPatch) -> None:
    for name in ("HEADWATER_CACHE_DIR", "CACHE_DIRECTORY", "XDG_CACHE_HOME"):
        patch.delenv(name, raising=False)
    patch.setattr(os.path, "expanduser", lambda path: path)


UNUSABLE = {
    world_writable: "mode 777",
    of_another: "belongs to user",
    a_file: "File exists",
    nowhere: "/proc/nowhere",
    homeless: "no home",
}


@pytest.mark.parametrize("spoil", UNUSABLE, ids=lambda spoil: spoil.__name__)
def test_without_a_folder_of_its_own_each_start_proves_and_serves(
    folder: Path,
    checks: list[str],
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patch:
        spoil(folder, patch)
        assert verdict(spec()).proven is not None
        assert verdict(spec()).deterministic
    assert len(checks) == 2
    assert [UNUSABLE[spoil] in line for line in caplog.messages] == [True] * 2  # one line a start
    assert not folder.is_dir() or not files(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"7",
        b"{}",
        b"[" * 100_000,
        b'{"key": KEY, "mode": "plainly", "proven": "2026-01-01T00:00:00+00:00"}',
        b'{"key": KEY, "mode": "compiled", "proven": "yesterday"}',
        b'{"key": KEY, "mode": "compiled", "proven": 7}',
        b'{"key": {}, "mode": "compiled", "proven": "2026-01-01T00:00:00+00:00"}',
    ],
)
def test_broken_verdict_file_is_ignored_and_replaced(folder: Path, checks: list[str], content: bytes) -> None:
    verdict(spec())
    (file,) = files(folder)
    whole = file.read_bytes()
    file.write_bytes(content.replace(b"KEY", json.dumps(key_of(spec())).encode()))
    assert verdict(spec()).deterministic
    assert len(checks) == 2
    assert json.loads(file.read_bytes())["key"] == json.loads(whole)["key"]
    verdict(spec())
    assert len(checks) == 2


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process grow beyond a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_on_a_full_disk_it_serves_and_leaves_nothing_behind(
    folder: Path, checks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # no line is written while no file can grow
    with full_disk():
        assert verdict(spec()).deterministic
    assert files(folder) == []
    verdict(spec())
    assert (len(checks), len(files(folder))) == (2, 1)


def test_two_starts_at_once_prove_twice_and_keep_one_whole_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)

    def check(*given: Any, **more: Any) -> SelfCheck:
        both.wait()
        return YES

    monkeypatch.setattr(verdicts, "self_check", check)
    found: list[SelfCheck] = []
    starts = [threading.Thread(target=lambda: found.append(verdict(spec()))) for _ in range(2)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert [one.deterministic for one in found] == [True, True]
    assert len(files(folder)) == 1
    assert verdict(spec()) in found


def test_the_oldest_verdicts_go(folder: Path, checks: list[str]) -> None:
    folder.mkdir(parents=True, mode=0o700)
    for age in range(MAX_VERDICT_FILES + 3):
        old = folder / f"exactness-{age}.json"
        old.write_text("{}")
        os.utime(old, (age, age))
    verdict(spec())
    verdict(spec())
    assert len(checks) == 1
    assert len(files(folder)) == MAX_VERDICT_FILES


def test_progress_counts_up_to_the_last_check() -> None:
    seen: list[tuple[int, int]] = []
    assert self_check(spec(), progress=lambda done, total: seen.append((done, total))).deterministic
    done = [done for done, _ in seen]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, seen[-1][1])
