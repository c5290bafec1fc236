"""The kernels compile for a card, and fit into its shared memory, though there is none here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = 99 * 1024  # bytes that a program may have on every card since compute capability 8.0
KERNELS = {
    "gpu.ragged._convolve", "gpu.ragged._keep_tail", "gpu.experts._product",
    "gpu.gdn._solve", "gpu.gdn._advance", "gpu.gdn._decode",
    "gpu.kda._advance", "gpu.mamba._advance", "gpu.mamba._decode", "gpu.mamba2._advance", "gpu.mamba2._decode",
    "gpu.attention._prefill", "gpu.attention._decode_split", "gpu.attention._merge",
    "gpu.mla._decode_split", "gpu.norm._squares", "gpu.norm._norm", "gpu.norm._gated_norm", "gpu.norm._unit",
    "gpu.norm._place", "gpu.attention._write", "gpu.product._product", "gpu.product._opened_product",
    "gpu.sampling._choose",
    "gpu.pointwise._activate", "gpu.pointwise._convolve_token", "gpu.pointwise._delta_gates", "gpu.pointwise._open",
}  # fmt: skip


@pytest.mark.full
def test_kernels_compile_and_fit_the_shared_memory_of_a_card() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.mixers.gpu.compiled"],
        cwd=Path(__file__).parents[3], env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    compiled = [json.loads(line) for line in ran.stdout.splitlines()]
    assert {one["kernel"] for one in compiled} == KERNELS
    assert [one for one in compiled if one["shared"] > SHARED] == []
