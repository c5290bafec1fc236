"""Processors as /proc/cpuinfo and the environment describe them."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headwater import machine
from headwater.machine import Cpu, cpu, read_cpu
from tests.processors import AMX, AVX2, AVX512, AVX512_BF16

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("flags", "native", "avx512"),
    [
        ("sse4_2 avx avx2 fma", False, False),
        ("avx2 avx512f avx512dq avx512bw avx512vl avx512_vnni", False, True),
        ("avx2 avx512f avx512bw avx512vl avx512_bf16", True, True),
        ("avx2 avx512f avx512bw avx512_bf16 amx_bf16 amx_tile amx_int8", True, True),
        ("", False, False),
    ],
)
def test_processor_flags_determine_native_bfloat16(flags: str, native: bool, avx512: bool) -> None:
    found = read_cpu(f"processor\t: 0\nmodel name\t: A Name\nflags\t\t: {flags}\n", {})
    assert (found.name, found.native_bfloat16, found.avx512) == ("A Name", native, avx512)


@pytest.mark.parametrize(
    ("features", "native"),
    [
        ("fp asimd evtstrm aes crc32 atomics asimdhp cpuid asimddp sve i8mm bf16", True),  # Neoverse V1
        ("fp asimd evtstrm aes crc32 atomics asimdhp cpuid asimddp", False),  # Neoverse N1
        ("fp asimd ebf16 svebf16", False),  # whole words only
    ],
)
def test_arm_processor_has_its_own_word_for_bfloat16(features: str, native: bool) -> None:
    found = read_cpu(f"processor\t: 0\nFeatures\t: {features}\nCPU implementer\t: 0x41\n", {})
    assert found.native_bfloat16 == native
    assert "asimd" in found.features
    assert not found.avx512
    assert found.name


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, AMX),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, AVX512_BF16),
        ({"ONEDNN_MAX_CPU_ISA": "avx512_core"}, AVX512),
        ({"DNNL_MAX_CPU_ISA": "AVX2"}, AVX2),
        ({"ATEN_CPU_CAPABILITY": "avx2"}, AVX2),
        ({"ONEDNN_MAX_CPU_ISA": "ALL", "ATEN_CPU_CAPABILITY": "avx512"}, AMX),
    ],
)
def test_processor_features_hidden_by_the_environment_are_absent(environment: dict[str, str], wanted: Cpu) -> None:
    assert read_cpu(f"model name\t: {AMX.name}\nflags\t\t: {' '.join(AMX.features)}\n", environment) == wanted


def test_without_a_cpuinfo_no_feature_is_claimed() -> None:
    assert read_cpu("", {}).features == ()


def test_this_processor_has_a_name() -> None:
    assert cpu().name


def test_without_affinity_all_cores_are_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    assert machine.usable_cores() == os.cpu_count()


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_memory_is_in_bytes(platform: str, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=7))
    assert machine.peak_memory() == 7 * unit


def test_no_file_needs_affinity() -> None:
    """Only `machine.py`, behind its guard, calls what macOS lacks."""
    folders = (ROOT / name for name in ("src", "papers", "benchmarks", "stress", "training", "examples"))
    files = [file for folder in folders for file in folder.rglob("*.py") if file.name != "machine.py"]
    assert [file for file in files if "sched_getaffinity" in file.read_text(encoding="utf-8")] == []


def test_windows_is_refused_in_one_sentence() -> None:
    code = "import sys; sys.platform = 'win32'; import headwater.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "headwater: Windows is not supported; use Linux or macOS, or Linux in WSL 2\n"


@pytest.mark.parametrize(
    ("name", "used"),
    [("", True), ("cooperlake", True), ("skylake-avx512", False), ("haswell", False), ("one that is not known", False)],
)
def test_kernels_use_only_features_of_both_processor_and_numba(
    monkeypatch: pytest.MonkeyPatch, name: str, used: bool
) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", name)
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("pretended", ("avx2", "avx512_vnni", "avx512_bf16")))
    assert [machine.compiles(feature) for feature in ("avx512_vnni", "avx512_bf16")] == [used, used]
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("pretended", ("avx2",)))
    assert not machine.compiles("avx512_vnni")
