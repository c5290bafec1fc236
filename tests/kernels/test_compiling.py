"""The folder for compiled kernels: whose it is, what its name depends on, and starts without one."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests import processors, programs

pytest.importorskip("numba", reason="numba is not installed")

PROGRAM = """
import logging, sys
logging.basicConfig(format="%(message)s")
import torch
from headwater.engine.passes import passes
from numba import config
print(passes().n_larger(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1.5])), config.CACHE_DIR)
"""


def start(folder: Path, program: str = PROGRAM, **environment: str) -> subprocess.CompletedProcess[str]:
    done = programs.run(program, HEADWATER_CACHE_DIR=str(folder), NUMBA_CACHE_DIR="", **environment)
    assert done.returncode == 0, done.stderr
    return done


def kept(folder: Path) -> set[Path]:
    return set(folder.rglob("*.nbc"))


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder of a first start, and what it said."""
    folder = tmp_path_factory.mktemp("first") / "cache"
    return folder, start(folder)


def test_compiled_kernels_are_kept_for_the_next_start(first_start) -> None:
    folder, first = first_start
    assert first.stdout.startswith("[2] ")
    assert len(kept(folder)) == 1
    assert {path.stat().st_mode & 0o777 for path in (folder, *folder.glob("kernels/*"))} == {0o700}
    times = {path: path.stat().st_mtime_ns for path in kept(folder)}
    assert start(folder).stdout == first.stdout
    assert {path: path.stat().st_mtime_ns for path in kept(folder)} == times


def test_two_processes_compile_a_kernel_once(tmp_path: Path) -> None:
    program = (
        PROGRAM
        + """
from headwater.kernels import sampling
stats = sampling.count_above_into.compiled.stats
print(sum(stats.cache_misses.values()), sum(stats.cache_hits.values()))
"""
    )
    with ThreadPoolExecutor(2) as processes:
        both = list(processes.map(partial(start, program=program), [tmp_path / "cache"] * 2))
    said = [one.stdout.splitlines() for one in both]
    assert all(first.startswith("[2] ") for first, _ in said)
    assert sorted(last for _, last in said) == ["0 1", "1 0"]  # compiled by one, loaded by the other


@pytest.mark.parametrize("broken", ["*.nbc", "*.nbi"])
def test_files_that_are_cut_off_are_compiled_again(first_start, tmp_path: Path, broken: str) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(first_start[0], folder)
    (file,) = folder.rglob(broken)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    again = start(folder)
    assert again.stdout.startswith("[2] ")
    assert again.stderr.count("cannot be read, so it is compiled again") == 1
    later = start(folder)
    assert later.stdout == again.stdout
    assert later.stderr == ""


def test_full_disk_is_logged_once(tmp_path: Path) -> None:
    full = """
import errno, os
from numba.core.caching import IndexDataCacheFile
def fail(*_): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
IndexDataCacheFile.save = fail
"""
    program = PROGRAM.replace("from numba import config", f"{full}from numba import config")
    program += "passes().largest(torch.tensor([[1.0, 2.0, 3.0]]))"
    run = start(tmp_path / "cache", program)
    assert run.stdout.startswith("[2] ")
    assert run.stderr == "kernels that are compiled now cannot be kept for later starts: No space left on device\n"
    assert not kept(tmp_path)


def test_code_for_another_processor_has_a_folder_of_its_own(first_start, tmp_path: Path) -> None:
    features = "+avx2,+fma,+f16c,+bmi,+bmi2"
    shutil.copytree(first_start[0], tmp_path / "cache")
    start(tmp_path / "cache", NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=features)
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 2


@pytest.mark.parametrize("mode", [0o777, 0o500])
def test_folder_writable_by_others_or_by_no_user_is_not_used(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    if os.access(folder, os.W_OK) and mode == 0o500:
        pytest.skip("this user may write to any folder")
    run = start(folder)
    assert run.stdout.startswith("[2] ")
    assert run.stderr.count("kernels are compiled at each start") == 1
    assert not kept(tmp_path)


PACKED = """
import hashlib, torch
from dataclasses import replace
from headwater.kernels import NF4
from headwater.mixers.linear import Linear
from headwater.mixers.numerics import Numerics
from headwater.mixers.quantised import Quantised
from headwater.models.packing import float8
of = torch.Generator().manual_seed(0)
codes, zeros = (torch.randint(0, 16, (96, n), generator=of, dtype=torch.uint8) for n in (128, 4))
weight = Quantised(codes, 4, torch.randn(96, 4, generator=of).half(), zeros)
nf4 = replace(weight, scale_NX=weight.scale_NX.float(), zero_NX=zeros[:, :1] * 0, table=NF4)
numbers = torch.randn(96, 128, generator=of).to(torch.float8_e4m3fn)
weights = weight, nf4, replace(weight, table=tuple(range(0, 256, 17))), float8(numbers, torch.rand(96, 4, generator=of))
digest = hashlib.sha256()
for weight in weights:
    for rows in (9, 3):
        y = Linear(weight, numerics=Numerics("compiled"))(torch.randn(rows, 128, generator=of), 0)
        digest.update(y.numpy().tobytes())
digest = digest.hexdigest()
"""

ASSEMBLY = (
    PACKED
    + """
from headwater.kernels import integers, product
from headwater.kernels.tile import WIDE
for dtype in (torch.float32, torch.bfloat16):
    Linear(torch.ones(64, 64, dtype=dtype), dtype=torch.float32)(torch.ones(9, 64), 0)
kernels = product.multiply, product.multiply_float8, product.widen_and_multiply, integers.multiply_integers
code = [text for kernel in kernels for text in kernel.compiled.inspect_asm().values()]
print(WIDE, len(code), sum(text.count("zmm") for text in code), sum(text.count("vfmadd") > 0 for text in code), digest)
"""
)


LESSER = {"AVX2": (), "AVX-512": (pytest.mark.full,)}  # half a minute of compiling each


@pytest.mark.parametrize("processor", [pytest.param(n, marks=LESSER[n]) for n in processors.had() if n in LESSER])
def test_code_for_a_lesser_processor_has_its_registers_and_the_same_bits(processor: str, tmp_path: Path) -> None:
    environment = processors.environment(processor) | {"NUMBA_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", ASSEMBLY], env=environment, capture_output=True, text=True, check=True)
    wide, compiled, of_512_bits, multiplying, digest = run.stdout.split()
    assert int(compiled) > 0
    assert multiplying == compiled
    assert (wide, int(of_512_bits) > 0) == (("False", False) if processor == "AVX2" else ("True", True))
    here: dict[str, str] = {}
    exec(PACKED, here)
    assert digest == here["digest"]
