"""Settings of the process that must come before anything is computed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from headwater.mixers.numerics import same_bits

# Every worker thread multiplies a part of the smallest normal number by a half: a denormal, unless it is flushed.
SCRIPT = """
import os, threading, torch
from headwater.mixers.numerics import prepare_process
prepare_process(2)
def all_flushed():
    prepare_process(2)
    x = torch.full((1 << 20,), torch.finfo(torch.float32).tiny)
    flushed.append(not (x * 0.5).any().item())
flushed = []
all_flushed()
thread = threading.Thread(target=all_flushed)
thread.start()
thread.join()
print(os.environ["MKL_CBWR"], torch.get_num_threads(), *flushed)
"""


@pytest.mark.parametrize(("given", "wanted"), [(None, "STRICT"), ("COMPATIBLE", "COMPATIBLE")])
def test_strict_mode_threads_and_flushed_denormals_in_every_thread(given: str | None, wanted: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    env |= {"MKL_CBWR": given} if given else {}
    out = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True).stdout
    mode, threads, *flushed = out.split()
    assert mode.endswith(wanted)
    assert (threads, flushed) == ("2", ["True", "True"])


def test_bits_are_those_of_numbers_and_of_denormal_ones() -> None:
    zero, one = torch.zeros(3), torch.tensor([0.0, 1.0, 2.0])
    denormal = torch.tensor([0, 1, 0], dtype=torch.int32).view(torch.float32)
    assert torch.equal(zero, denormal), "as floats they are equal, since denormals are flushed"
    assert not same_bits(zero, denormal)
    assert same_bits(zero, -zero)
    assert same_bits(one, one.clone())
    assert not same_bits(one, -one)
    assert not same_bits(one.bfloat16(), one.bfloat16() + 1)


# The workers flush denormals, the thread that starts them does not any more: results depend on who computes them.
MIXED = """
import torch
from headwater.engine.selfcheck import _product_checks, self_check
from headwater.mixers.numerics import prepare_process
from tests.engine.test_selfcheck import spec
prepare_process(2)
torch.ones(1 << 20).add_(1)
for flushed in (True, False):
    torch.set_flush_denormal(flushed)
    products = [next(check(), None) for check in _product_checks(spec(), "cpu", "compiled")]
    print(self_check(spec()).deterministic, products.count(None), len(products))
"""


def test_the_self_check_finds_threads_that_keep_denormals() -> None:
    """Products are found whose outputs several threads compute: two of six have those of one task."""
    pytest.importorskip("numba", reason="numba is not installed")
    out = subprocess.run([sys.executable, "-c", MIXED], capture_output=True, text=True, check=True).stdout
    flushed, mixed = (line.split() for line in out.splitlines())
    assert flushed == ["True", "6", "6"]
    assert mixed == ["False", "2", "6"]
