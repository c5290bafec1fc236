"""The machine that runs this process: its processor, the cores it may use, versions of packages. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

X86_FEATURES = (
    "avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
)  # fmt: skip
ARM_FEATURES = ("asimd", "sve", "i8mm", "bf16")
CPU_FEATURES = X86_FEATURES + ARM_FEATURES
CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # a system call of Linux on x86-64 and its arguments
UNITS = (1e9, "GB"), (1e6, "MB"), (1e3, "kB")
UNKNOWN = 2**63  # bytes: above any memory
IDENTIFYING = {  # fields of it, of x86 and of ARM
    "vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features",
}  # fmt: skip
NATIVE_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}
# Features hidden by ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY from the libraries that read them.
HIDDEN_BY_ONEDNN = {
    **dict.fromkeys(("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), ("avx512", "amx")),
    **dict.fromkeys(("AVX512_CORE",), ("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx")),
    **dict.fromkeys(("AVX512_CORE_VNNI",), ("avx512_bf16", "avx512_fp16", "amx")),
    "AVX512_CORE_BF16": ("avx512_fp16", "amx"),
    **dict.fromkeys(("AVX512_CORE_FP16", "AVX10_1_512"), ("amx",)),
}
# Features that numba's compiler may use if NUMBA_CPU_NAME names the processor to compile for; none by any other name.
COMPILED_FOR = {
    "cascadelake": ("avx512_vnni",),
    **dict.fromkeys(("cooperlake", "znver4", "znver5"), ("avx512_vnni", "avx512_bf16")),
    "sapphirerapids": ("avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
}
HIDDEN_BY_TORCH = dict.fromkeys(("default", "avx2"), ("avx512", "amx"))


@dataclass(frozen=True, slots=True)
class Cpu:
    """Features of a processor that the choice of kernels depends on."""

    name: str
    features: tuple[str, ...]  # those of CPU_FEATURES that it has and that the environment leaves in use

    @property
    def of_bfloat16(self) -> list[str]:
        """Return the features that multiply bfloat16 faster than float32."""
        return [feature for feature in self.features if feature in NATIVE_BFLOAT16]

    @property
    def native_bfloat16(self) -> bool:
        """True if the processor multiplies bfloat16 faster than float32 (AVX512-BF16, AMX, or BF16 of ARM)."""
        return bool(self.of_bfloat16)

    @property
    def has_amx(self) -> bool:
        return any(feature.startswith("amx") for feature in self.features)

    def without(self, hidden: str | tuple[str, ...]) -> Cpu:
        """Return the processor without features whose names begin so."""
        return Cpu(self.name, tuple(feature for feature in self.features if not feature.startswith(hidden)))

    @property
    def avx512(self) -> bool:
        return {"avx512f", "avx512bw"} <= set(self.features)


@cache
def cpu() -> Cpu:
    """Return this machine's processor, within what the system, ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY allow."""
    found = read_cpu(CPUINFO.read_text() if CPUINFO.exists() else "", dict(os.environ))
    return found if not found.has_amx or _amx_is_permitted() else found.without("amx")


def _amx_is_permitted() -> bool:
    """Ask Linux to save the registers of AMX for this process and those that it forks; before 5.16 it does not."""
    refused: int = ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)
    return refused == 0


def read_cpu(cpuinfo: str, environment: dict[str, str]) -> Cpu:
    """Return the processor that the text of /proc/cpuinfo describes. Empty text, as on macOS, names no feature."""
    fields = dict(line.replace("\t", "").split(": ", 1) for line in cpuinfo.splitlines() if ": " in line)
    have = (fields.get("flags") or fields.get("Features", "")).split()  # x86's word and ARM's
    isa = environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA") or ""
    hidden = HIDDEN_BY_ONEDNN.get(isa.upper(), ())
    hidden += HIDDEN_BY_TORCH.get(environment.get("ATEN_CPU_CAPABILITY", "").lower(), ())
    name = fields.get("model name", platform.processor() or platform.machine())
    return Cpu(name, tuple(feature for feature in CPU_FEATURES if feature in have)).without(tuple(hidden))


def compiles(feature: str) -> bool:
    """Return whether kernels may use a feature: the processor has it, and numba does not compile for a lesser one."""
    name = os.environ.get("NUMBA_CPU_NAME")
    return feature in cpu().features and (not name or feature in COMPILED_FOR.get(name, ()))


def identity() -> list[str]:
    """Return the lines of /proc/cpuinfo that tell kinds of processors apart; those of all cores, each once."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    return sorted({line for line in lines if line.partition(":")[0].strip() in IDENTIFYING})


def affinity() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may run on; empty if the system does not tell."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(affinity()) or os.cpu_count() or 1


def cpu_quota(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> float | None:
    """Return the cores that the control group may use (cgroup v2 or v1), the least of its parents'; None: no limit."""
    quotas = [quota for folder in _own_folders(root, own) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _own_folders(root: Path, own: Path) -> set[Path]:
    """Return the folders of this process's control group and its parents. In a container the group is the root."""
    found = {root, root / "cpu", root / "cpu,cpuacct"}
    for line in own.read_text().splitlines() if own.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            group = root / controllers / path.strip("/")
            found |= {group, *(parent for parent in group.parents if parent.is_relative_to(root))}
    return found


def _quota(folder: Path) -> float | None:
    two = read_words(folder / "cpu.max")
    if len(two) == 2 and two[0] != "max":
        return int(two[0]) / int(two[1])
    quota, period = (read_words(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota[0]) / int(period[0]) if quota and period and int(quota[0]) > 0 else None


def quota_threads() -> int | None:
    """Return the threads that a quota of cores leaves; None if it allows all usable cores.

    More threads than that would be stopped together for the rest of each period.
    """
    quota = cpu_quota()
    return max(1, int(quota)) if quota is not None and quota < usable_cores() else None


def memory_limit(root: Path = CGROUPS) -> int | None:
    """Return the bytes that the control group may use; None: no limit."""
    for path in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):
        words = read_words(path)
        if words and words[0] != "max" and int(words[0]) < 2**60:
            return int(words[0])
    return None


def meminfo(name: str) -> int | None:
    """Return a field of /proc/meminfo in bytes, or None if there is none."""
    lines = MEMINFO.read_text().splitlines() if MEMINFO.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def total_memory() -> int:
    """Return the bytes of memory and swap; a number above all if the system does not tell."""
    total = meminfo("MemTotal")
    return UNKNOWN if total is None else total + (meminfo("SwapTotal") or 0)


def free_memory() -> int:
    """Return the bytes that this process may still take; a number above all if the system does not tell."""
    return min(value for value in (meminfo("MemAvailable"), memory_limit(), UNKNOWN) if value is not None)


def read_words(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []


def in_units(n_bytes: float | None) -> str:
    """Format bytes with three digits: 9.09 MB, 1,230 GB."""
    if n_bytes is None or n_bytes == UNKNOWN:
        return "unknown"
    size, unit = next(((size, unit) for size, unit in UNITS if n_bytes >= size), (1, "bytes"))
    return f"{float(f'{n_bytes / size:.3g}'):,g} {unit}"


def peak_memory() -> int:
    """Return the largest resident memory that this process ever had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def return_free_memory() -> None:
    """Return memory to the system that the allocator keeps and nothing uses; only glibc's can, in about 2 ms."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
