"""Findings of `headwater doctor` that need no torch: this machine's processor, cores, memory, port and packages."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headwater import machine
from headwater.hub_name import HubName
from headwater.machine import (
    CPU_FEATURES,
    cpu_quota,
    in_units,
    meminfo,
    memory_limit,
    usable_cores,
    versions,
)

OK, SLOW, WARN, FAIL = "ok", "slow", "warn", "FAIL"
PACKAGES = (
    "headwater",
    "torch",
    "numba",
    "llvmlite",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "fastapi",
    "uvicorn",
    "httpx",
    "llguidance",
    "matplotlib",
)
NEEDED_PYTHON = (3, 11)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: a FAIL breaks a promise of the server; advice says what to change."""

    name: str
    level: str
    value: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Intended:
    """The settings that the server is to run with."""

    model: Path | HubName | None
    memory: int  # bytes
    threads: int | None
    host: str
    port: int
    recheck: bool = False
    weights: str = "auto"
    rope_scaling: str | None = None


def of_machine(intended: Intended) -> Iterator[Finding]:
    """Examine everything that needs no torch."""
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
        return Finding("cpu", WARN, f"{name}: {have}", "without AVX2 products are slow, and no kernel was tested")
    return Finding("cpu", OK, f"{name}: {have}")


def of_cores(threads: int | None) -> Finding:
    """Compare the threads with the cores that affinity and the control group's quota allow."""
    usable, quota = usable_cores(), cpu_quota()
    found = f"{usable} usable of {os.cpu_count()}" + (f", quota {quota:g}" if quota is not None else "")
    have = min(usable, quota) if quota is not None else usable
    if threads is not None and threads > have:
        advice = f"more threads than cores: --threads {max(1, int(have))}"
        return Finding("cores", WARN, f"{found}; {threads} threads", advice)
    return Finding("cores", OK, found)


def of_memory(wanted: int) -> Finding:
    total, available = (meminfo(name) for name in ("MemTotal", "MemAvailable"))
    limit = memory_limit()
    found = f"{in_units(total)} in all, {in_units(available)} available"
    found += f", limit {in_units(limit)}" if limit is not None else ""
    found += f"; --memory {in_units(wanted)}"
    room = min(value for value in (available, limit, 2**63) if value is not None)
    if wanted > room:
        return Finding("memory", FAIL, found, f"--memory is too large: at most {in_units(room)}, less the weights")
    if wanted > 0.8 * room:
        return Finding("memory", WARN, found, "the weights and the process need memory besides --memory")
    return Finding("memory", OK, found)


def of_port(host: str, port: int) -> Finding:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            advice = "another server may be running there; choose another port with --port"
            return Finding("port", WARN, f"{host}:{port}: {error.strerror}", advice)
    return Finding("port", OK, f"{host}:{port} is free")
