"""Settings of the process that must come before anything is computed."""

import pytest
import torch

from headwater.mixers.numerics import same_bits
from tests import programs

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
    chosen = {"MKL_CBWR": given} if given else {}
    mode, threads, *flushed = programs.run(SCRIPT, without="MKL_CBWR", **chosen).stdout.split()
    assert mode.endswith(wanted)
    assert (threads, flushed) == ("2", ["True", "True"])


def test_same_bits_are_those_of_equal_numbers_of_one_sign() -> None:
    zero, one = torch.zeros(3), torch.tensor([0.0, 1.0, 2.0])
    denormal = torch.tensor([0, 1, 0], dtype=torch.int32).view(torch.float32)
    assert torch.equal(zero, denormal), "as floats they are equal, since denormals are flushed"
    assert not same_bits(zero, denormal)
    assert same_bits(one, one.clone())
    assert not same_bits(one, -one)
    for dtype in (torch.bfloat16, torch.float16):
        assert same_bits(one.to(dtype), one.to(dtype))
        assert not same_bits(one.to(dtype), one.to(dtype) + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_of_two_signs_and_nan_have_not_the_same_bits(dtype: torch.dtype) -> None:
    zero, nan = torch.zeros(3, dtype=dtype), torch.full((3,), float("nan"), dtype=dtype)
    assert torch.equal(zero, -zero), "as floats they are equal"
    assert not same_bits(zero, -zero)
    assert not same_bits(nan, nan)


# The workers flush denormals, the thread that starts them does not any more: results depend on who computes them.
MIXED = """
import torch
from headwater.engine.proof.selfcheck import _product_checks, self_check
from headwater.mixers.numerics import prepare_process
from tests.engine.proof.test_selfcheck import spec
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
    flushed, mixed = (line.split() for line in programs.run(MIXED).stdout.splitlines())
    assert flushed == ["True", "6", "6"]
    assert mixed == ["False", "2", "6"]


# The same threads, and the checks of kernels of each layer.
MIXED_KERNELS = """
import torch
from headwater.engine.proof.selfcheck import _kernel_checks
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts
from headwater.layers.gdn import DeltaNet
from headwater.layers.kda import DeltaAttention
from headwater.layers.lightning import Lightning
from headwater.layers.mamba import Mamba
from headwater.layers.mamba2 import Mamba2
from headwater.mixers.numerics import prepare_process
from headwater.layers.architecture import Architecture, Block, Part
from headwater.spec import ModelSpec
prepare_process(2)
torch.ones(1 << 20).add_(1)
layers = [
    GroupedAttention(64, 4, 2, 16), Experts(64, 8, 2, 64), DeltaNet(64, 2, 4, 16, 32, 4),
    DeltaAttention(64, heads=4, head_dim=32, conv=4),
    Lightning(64, 4, 16, (0.1,) * 4), Mamba(64, inner=64, state=16, conv=4, step_rank=6),
    Mamba2(64, heads=4, head_dim=32, state=32, groups=2, conv=4),
]
for flushed in (True, False):
    torch.set_flush_denormal(flushed)
    for layer in layers:
        block = Block("norm.weight", (Part(layer, "any"),))
        spec = ModelSpec.of(Architecture("any", 64, 64, (block,), 1024, 1e-6), "float32")
        for check in _kernel_checks(spec, "cpu"):
            if check.func.__module__.startswith("headwater.engine.proof.cpu_"):
                with torch.inference_mode():
                    found = next(check(), None) is not None
                print(flushed, layer.kind, check.func.__name__, found)
"""


def test_the_checks_of_all_kernels_find_threads_that_keep_denormals() -> None:
    pytest.importorskip("numba", reason="numba is not installed")
    done = programs.run(MIXED_KERNELS)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {found for flushed, *_, found in lines if flushed == "True"} == {"False"}, done.stderr
    mixed = {(kind, check): found for flushed, kind, check, found in lines if flushed == "False"}
    assert len(mixed) == 2 + 2 * 5
    in_torch = {(kind, "broken_prefill") for kind, _ in mixed if kind != "gated_delta_net"}  # no kernel prefills
    assert {found for of, found in mixed.items() if of not in in_torch} == {"True"}
