"""Processors that tests pretend to run on: less than the real one, never more."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater import machine
from headwater.machine import Cpu

AMX = Cpu("pretended", ("avx2", "avx512f", "avx512bw", "avx512_bf16", "amx_tile", "amx_bf16"))
AVX512_BF16 = Cpu("pretended", ("avx2", "avx512f", "avx512bw", "avx512_bf16"))
AVX512 = Cpu("pretended", ("avx2", "avx512f", "avx512bw"))
AVX2 = Cpu("pretended", ("avx2",))


def _settings(
    torch_uses: str, onednn_uses: str, numba_compiles_for: str, features: str, numpy_is: str
) -> dict[str, str]:
    compiler = {"NUMBA_CPU_NAME": numba_compiles_for, "NUMBA_CPU_FEATURES": features}
    libraries = {"ATEN_CPU_CAPABILITY": torch_uses, "ONEDNN_MAX_CPU_ISA": onednn_uses, "OPENBLAS_CORETYPE": numpy_is}
    return libraries | compiler


# By name, the settings under which the libraries of a process compute as on that processor, and what it must have.
ENVIRONMENTS = {
    "AVX2": (_settings("avx2", "AVX2", "haswell", "+avx2,+fma,+f16c,+bmi,+bmi2", "Haswell"), AVX2),
    "AVX-512": (_settings("avx512", "AVX512_CORE", "skylake-avx512", "", "SkylakeX"), AVX512),
    "AVX512-BF16": (_settings("avx512", "AVX512_CORE_BF16", "cooperlake", "", "Cooperlake"), AVX512_BF16),
    "AMX": ({}, AMX),
}


def compiled_kernels() -> str:
    """Return the folder of compiled kernels for all processes of a run and of the next, by their source."""
    root = Path(__file__).parents[1]
    sources = sorted((root / "src" / "headwater" / "kernels").glob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:16]
    return str(root / ".pytest_cache" / f"kernels-{digest}")


def had() -> list[str]:
    """The names in ENVIRONMENTS that this machine's processor is, or can pretend to be."""
    features = set(machine.cpu().features)
    return [name for name, (_, needed) in ENVIRONMENTS.items() if set(needed.features) <= features]


def environment(name: str) -> dict[str, str]:
    """Return the environment of this process, restricted to the processor of that name."""
    kept = {key: value for key, value in os.environ.items() if key != "MKL_CBWR"}
    return kept | ENVIRONMENTS[name][0]


def pretend(monkeypatch: pytest.MonkeyPatch, cpu: Cpu) -> None:
    """Run on `cpu`: without AVX-512, torch refuses packed bfloat16 products in its own words."""
    monkeypatch.setattr(machine, "cpu", lambda: cpu)
    if not cpu.avx512:
        pack = torch.ops.mkldnn._reorder_linear_weight
        monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refusing_bfloat16(pack))


def refusing_bfloat16(pack: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def refuse(weight_NK: torch.Tensor, *given: Any) -> torch.Tensor:
        if weight_NK.dtype == torch.bfloat16:
            raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx_ne_convert or ...")
        return pack(weight_NK, *given)

    return refuse
