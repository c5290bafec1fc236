"""Processors that tests pretend to run on: less than the real one, never more."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headwater import machine
from headwater.machine import Cpu

AMX = Cpu("pretended", ("avx2", "avx512f", "avx512bw", "avx512_bf16", "amx_tile", "amx_bf16"))
AVX512_BF16 = Cpu("pretended", ("avx2", "avx512f", "avx512bw", "avx512_bf16"))
AVX512 = Cpu("pretended", ("avx2", "avx512f", "avx512bw"))
AVX2 = Cpu("pretended", ("avx2",))
# By name, the settings under which the libraries of a process compute as on that processor, and what it must have.
ENVIRONMENTS = {
    "AVX2": ({"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, AVX2),
    "AVX-512": ({"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, AVX512),
    "AVX512-BF16": ({"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, AVX512_BF16),
    "AMX": ({}, AMX),
}


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
