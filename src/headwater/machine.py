"""The machine that runs this process: its processor, the cores it may use, versions of packages. Imports no torch."""

from __future__ import annotations

import os
import platform
import resource
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

X86_FEATURES = ("avx2", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
ARM_FEATURES = ("asimd", "sve", "i8mm", "bf16")
CPU_FEATURES = X86_FEATURES + ARM_FEATURES
CPUINFO = Path("/proc/cpuinfo")
NATIVE_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}
# Features hidden by ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY from the libraries that read them.
HIDDEN_BY_ONEDNN = {
    **dict.fromkeys(("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), ("avx512", "amx")),
    **dict.fromkeys(("AVX512_CORE", "AVX512_CORE_VNNI"), ("avx512_bf16", "avx512_fp16", "amx")),
    "AVX512_CORE_BF16": ("avx512_fp16", "amx"),
    **dict.fromkeys(("AVX512_CORE_FP16", "AVX10_1_512"), ("amx",)),
}
HIDDEN_BY_TORCH = dict.fromkeys(("default", "avx2"), ("avx512", "amx"))


@dataclass(frozen=True, slots=True)
class Cpu:
    """A processor, as far as the choice of kernels depends on it."""

    name: str
    features: tuple[str, ...]  # those of CPU_FEATURES that it has and that the environment leaves in use

    @property
    def native_bfloat16(self) -> bool:
        """True if the processor multiplies bfloat16 faster than float32 (AVX512-BF16, AMX, or BF16 of ARM)."""
        return not NATIVE_BFLOAT16.isdisjoint(self.features)

    @property
    def avx512(self) -> bool:
        return {"avx512f", "avx512bw"} <= set(self.features)


@cache
def cpu() -> Cpu:
    """Return the processor of this machine, within what ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY allow."""
    return read_cpu(CPUINFO.read_text() if CPUINFO.exists() else "", dict(os.environ))


def read_cpu(cpuinfo: str, environment: dict[str, str]) -> Cpu:
    """Return the processor that the text of /proc/cpuinfo describes. Empty text, as on macOS, names no feature."""
    fields = dict(line.replace("\t", "").split(": ", 1) for line in cpuinfo.splitlines() if ": " in line)
    have = (fields.get("flags") or fields.get("Features", "")).split()  # x86's word and ARM's
    isa = environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA") or ""
    hidden = HIDDEN_BY_ONEDNN.get(isa.upper(), ())
    hidden += HIDDEN_BY_TORCH.get(environment.get("ATEN_CPU_CAPABILITY", "").lower(), ())
    features = tuple(f for f in CPU_FEATURES if f in have and not f.startswith(hidden))
    return Cpu(fields.get("model name", platform.processor() or platform.machine()), features)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_memory() -> int:
    """Return the largest resident memory that this process ever had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def versions(*packages: str) -> dict[str, str | None]:
    """Return installed versions by package; None for a package that is not installed."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def describe() -> dict[str, object]:
    """Describe the machine as a JSON object, for the reports of runs whose figures depend on it."""
    return {
        "cpu": cpu().name,
        "features": list(cpu().features),
        "cores": usable_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **versions("headwater", "httpx"),
    }
