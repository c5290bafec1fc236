"""What `headwater doctor` finds out about a machine without torch."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headwater import machine
from headwater.machine import CPU_FEATURES, usable_cores, versions

OK, WARN, FAIL = "ok", "warn", "FAIL"
PACKAGES = (
    "headwater",
    "torch",
    "transformers",
    "tokenizers",
    "fastapi",
    "uvicorn",
    "httpx",
    "llguidance",
    "matplotlib",
)
NEEDED_PYTHON = (3, 11)
CGROUPS = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A FAIL keeps a server from working as promised; advice says what to do."""

    name: str
    level: str
    value: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Intended:
    """How the server is to run."""

    model: Path | None
    memory: int  # bytes
    threads: int | None
    host: str
    port: int


def of_machine(intended: Intended) -> Iterator[Finding]:
    yield of_python()
    yield of_cpu()
    yield of_cores(intended.threads)
    yield of_memory(intended.memory)
    yield of_port(intended.host, intended.port)
    found = versions(*PACKAGES)
    yield Finding("packages", OK, ", ".join(f"{name} {v}" for name, v in found.items() if v is not None))


def of_python() -> Finding:
    level = OK if tuple(map(int, platform.python_version_tuple()[:2])) >= NEEDED_PYTHON else FAIL
    needed = ".".join(map(str, NEEDED_PYTHON))
    advice = "" if level == OK else f"needs Python {needed} or later"
    return Finding("python", level, f"{platform.python_version()} on {platform.platform()}", advice)


def of_cpu() -> Finding:
    name, features = machine.cpu().name, machine.cpu().features
    have = ", ".join(features) or f"none of {', '.join(CPU_FEATURES)}"
    if "avx2" not in features and platform.machine() in ("x86_64", "AMD64"):
        return Finding("cpu", WARN, f"{name}: {have}", "without AVX2 products are slow, and no kernel is proven for it")
    return Finding("cpu", OK, f"{name}: {have}")


def of_cores(threads: int | None) -> Finding:
    """Cores that this process may use: by affinity and by its control group's quota."""
    usable, quota = usable_cores(), cpu_quota()
    told = f"{usable} usable of {os.cpu_count()}" + (f", quota {quota:g}" if quota is not None else "")
    have = min(usable, quota) if quota is not None else usable
    if threads is not None and threads > have:
        return Finding(
            "cores", WARN, f"{told}; {threads} threads", f"more threads than cores: --threads {max(1, int(have))}"
        )
    if threads is None and quota is not None and quota < usable:
        advice = f"torch would take {usable} threads, the quota is {quota:g}: --threads {max(1, int(quota))}"
        return Finding("cores", WARN, told, advice)
    return Finding("cores", OK, told)


def cpu_quota(root: Path = CGROUPS) -> float | None:
    """Cores that the control group may use; None: no limit. Reads cgroup v2 and v1."""
    two = read_words(root / "cpu.max")
    if len(two) == 2 and two[0] != "max":
        return int(two[0]) / int(two[1])
    quota, period = (read_words(root / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota[0]) / int(period[0]) if quota and period and int(quota[0]) > 0 else None


def of_memory(wanted: int) -> Finding:
    total, available = (meminfo(name) for name in ("MemTotal", "MemAvailable"))
    limit = memory_limit()
    told = f"{gigabytes(total)} in all, {gigabytes(available)} available"
    told += f", limit {gigabytes(limit)}" if limit is not None else ""
    told += f"; --memory {gigabytes(wanted)}"
    room = min(value for value in (available, limit, 2**63) if value is not None)
    if wanted > room:
        return Finding(
            "memory", FAIL, told, f"--memory beyond what there is: at most {gigabytes(room)}, less the weights"
        )
    if wanted > 0.8 * room:
        return Finding("memory", WARN, told, "weights and the process need room beside --memory")
    return Finding("memory", OK, told)


def memory_limit(root: Path = CGROUPS) -> int | None:
    """Bytes that the control group may use; None: no limit."""
    for path in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):
        words = read_words(path)
        if words and words[0] != "max" and int(words[0]) < 2**60:
            return int(words[0])
    return None


def meminfo(name: str) -> int | None:
    """Bytes, None where the system does not tell."""
    lines = MEMINFO.read_text().splitlines() if MEMINFO.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def of_port(host: str, port: int) -> Finding:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            advice = "a server may be running there already; choose another with --port"
            return Finding("port", WARN, f"{host}:{port}: {error.strerror}", advice)
    return Finding("port", OK, f"{host}:{port} is free")


def read_words(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []


def gigabytes(n: int | None) -> str:
    return "unknown" if n is None else f"{n / 1e9:.1f} GB"
