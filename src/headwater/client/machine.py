"""Where a run was made: what its figures depend on beside the code. Imports no torch."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")


def versions(*packages: str) -> dict[str, str | None]:
    """None where a package is not installed."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def cpu() -> tuple[str, list[str]]:
    """Its name, and which of CPU_FEATURES it has."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    fields = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
    have = fields.get("flags", "").split()
    return fields.get("model name", platform.processor() or platform.machine()), [f for f in CPU_FEATURES if f in have]


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, object]:
    name, features = cpu()
    return {
        "cpu": name,
        "features": features,
        "cores": usable_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **versions("headwater", "httpx"),
    }
