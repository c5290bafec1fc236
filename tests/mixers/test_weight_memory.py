"""Weights that processes of a host hold once: whose memory they are in, and what ended or broken holders do."""

import errno
import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.engine.proof.fingerprint import probe
from headwater.mixers import weight_memory
from headwater.mixers.weight_memory import MIN_SHARED_BYTES, SharedWeights, kept, of_a_model, share
from headwater.models.files import EMBEDDED_FOLDER
from headwater.models.load import load_model
from tests.mixers.test_linear import WEIGHTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory that processes can name")

KEEP = """
import sys, torch
from pathlib import Path
from headwater.mixers.weight_memory import SharedWeights
tensor = SharedWeights(Path(sys.argv[1])).keep(torch.arange(10**6))
print("kept", flush=True)
sys.stdin.read()
"""


def memory_at(address: int) -> int:
    """The inode of the file that is mapped there, 0 for private memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        first, end = (int(part, 16) for part in addresses.split("-"))
        if first <= address < end:
            return int(inode)
    raise AssertionError(f"nothing is mapped at {address:x}")


def memory_of(tensor: torch.Tensor) -> int:
    return memory_at(tensor.data_ptr())


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[None]:
    share(tmp_path)
    yield
    weight_memory._shared = None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16])
def test_equal_weights_are_in_one_memory_and_others_are_not(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = (SharedWeights(tmp_path) for _ in range(2))
    weight, other = (torch.randint(-99, 99, (300, 77)).to(torch.float32).to(dtype) for _ in range(2))
    mine, theirs, others = first.keep(weight), second.keep(weight.clone()), second.keep(other)
    for tensor, wanted in ((mine, weight), (theirs, weight), (others, other)):
        assert tensor.dtype == dtype
        assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8))
    assert memory_of(mine) == memory_of(theirs) != 0
    assert memory_of(others) not in (0, memory_of(mine)), "what nobody had is in the second one's memory"
    assert memory_of(weight) == 0


def test_written_pages_stay_private(tmp_path: Path) -> None:
    mine, theirs = (SharedWeights(tmp_path).keep(torch.ones(MIN_SHARED_BYTES)) for _ in range(2))
    mine.zero_()
    assert theirs.all()
    assert SharedWeights(tmp_path).keep(torch.ones(MIN_SHARED_BYTES)).all()


def test_a_weight_outlives_the_process_that_wrote_it(tmp_path: Path) -> None:
    weight = torch.arange(10**6)
    with subprocess.Popen(
        [sys.executable, "-c", KEEP, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"kept\n"
        mapped = SharedWeights(tmp_path).keep(weight)
        (holders,) = [file.read_text().splitlines() for file in tmp_path.iterdir()]
        assert [int(line.split()[0]) for line in holders] == [process.pid, os.getpid()]
        process.kill()
    assert torch.equal(mapped, weight)
    later = SharedWeights(tmp_path).keep(weight)
    assert memory_of(later) == memory_of(mapped), "found with the one that mapped it"


@pytest.mark.parametrize(
    "entry",
    ["", "1 2", "no such thing", "999999999 3 0", "1 1 0", "OWN 1 0", "OWN 99999 0", "\xff" * 9],
)
def test_listed_holder_without_the_weight_is_skipped(entry: str, tmp_path: Path) -> None:
    weight, entry = torch.ones(MIN_SHARED_BYTES), entry.replace("OWN", str(os.getpid()))
    held = SharedWeights(tmp_path).keep(weight)
    (file,) = tmp_path.iterdir()
    good = file.read_text()
    process, number, _ = good.split()
    SharedWeights(tmp_path)
    file.write_text(f"{entry}\n{process} {number} {2**40}\n{process} {number} 1\n{good}")
    shared = SharedWeights(tmp_path)
    found = shared.keep(weight)
    assert torch.equal(found, weight)
    assert memory_of(found) != 0
    file.write_text(f"{entry}\n")
    SharedWeights(tmp_path)
    assert not list(tmp_path.iterdir()), "no process has it, as far as the file says"
    assert torch.equal(held, weight)


def test_other_bits_with_the_same_digest_are_not_mapped(tmp_path: Path) -> None:
    weight, other = torch.ones(MIN_SHARED_BYTES), torch.zeros(MIN_SHARED_BYTES)
    first = SharedWeights(tmp_path)
    first.keep(weight)
    (of_weight,) = tmp_path.iterdir()
    first.keep(other)
    (of_other,) = set(tmp_path.iterdir()) - {of_weight}
    of_weight.write_bytes(of_other.read_bytes())
    assert torch.equal(SharedWeights(tmp_path).keep(weight), weight)


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("kind", WEIGHTS)
def test_panels_of_every_format_are_shared_if_they_are_a_models(kind: str) -> None:
    panels = pytest.importorskip("headwater.mixers.panels", reason="numba is not installed")
    torch.manual_seed(0)
    weight = WEIGHTS[kind](640, 256)
    with of_a_model():
        whole, again = (panels.held(weight, torch.float32) for _ in range(2))
    private = panels.held(weight, torch.float32)
    for one, two, own in zip(whole.arrays, again.arrays, private.arrays, strict=True):
        if np.size(one) * getattr(one, "itemsize", 0) < MIN_SHARED_BYTES:
            continue
        assert memory_at(one.ctypes.data) == memory_at(two.ctypes.data) != 0
        assert memory_at(own.ctypes.data) == 0
        assert np.array_equal(one.view(np.uint8), own.view(np.uint8))
        assert one.flags.writeable == own.flags.writeable, "another type for kernels"


@pytest.mark.usefixtures("sharing")
def test_weights_are_private_once_the_system_has_no_memory_for_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "memfd_create", full)
    for _ in range(2):
        with of_a_model():
            assert memory_of(kept(torch.zeros(MIN_SHARED_BYTES))) == 0
    assert caplog.text.count("weights are not shared with other workers of this host: [Errno 28] No space") == 1


def test_a_file_that_another_process_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, removed = fcntl.flock, []

    def removing(file: int, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        locked(file, how)

    monkeypatch.setattr(fcntl, "flock", removing)
    first = SharedWeights(tmp_path).keep(torch.ones(MIN_SHARED_BYTES))
    assert removed
    assert memory_of(SharedWeights(tmp_path).keep(torch.ones(MIN_SHARED_BYTES))) == memory_of(first)


def test_each_weight_may_take_an_open_file(tmp_path: Path) -> None:
    had = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1000, had[1]), had[1]))
    try:
        share(tmp_path)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (had[1], had[1])
    finally:
        weight_memory._shared = None
        resource.setrlimit(resource.RLIMIT_NOFILE, had)


def test_without_a_folder_weights_are_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.touch()
    share(file)
    assert weight_memory._shared is None
    assert "weights are not shared with other workers of this host: " in caplog.text


def test_folders_of_other_starts_are_removed_when_they_are_old() -> None:
    folder = weight_memory._folder_of_host()
    young, old = (folder.with_name(name) for name in ("young", "old"))
    for other in (young, old):
        other.mkdir()
    os.utime(old, (0, 0))
    assert weight_memory._folder_of_host() == folder
    assert (young.exists(), old.exists()) == (True, False)
    young.rmdir()


@pytest.mark.usefixtures("sharing")
def test_small_weights_are_private() -> None:
    with of_a_model():
        assert memory_of(kept(torch.zeros(MIN_SHARED_BYTES // 4 - 1))) == 0
        assert memory_of(kept(torch.zeros(MIN_SHARED_BYTES // 4))) != 0


@pytest.mark.usefixtures("sharing")
def test_a_model_with_shared_weights_computes_the_same_bits(tmp_path: Path) -> None:
    first, second = load_model(EMBEDDED_FOLDER), load_model(EMBEDDED_FOLDER)
    assert list(tmp_path.iterdir())
    weight_memory._shared = None
    private = load_model(EMBEDDED_FOLDER)
    assert probe(first).digest == probe(second).digest == probe(private).digest
