"""Processors as /proc/cpuinfo and the environment describe them."""

from __future__ import annotations

import pytest

from headwater.machine import Cpu, cpu, read_cpu
from tests.processors import AMX, AVX2, AVX512, AVX512_BF16


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
def test_flags_say_what_a_processor_multiplies_natively(flags: str, native: bool, avx512: bool) -> None:
    found = read_cpu(f"processor\t: 0\nmodel name\t: A Name\nflags\t\t: {flags}\n", {})
    assert (found.name, found.native_bfloat16, found.avx512) == ("A Name", native, avx512)


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
def test_what_the_environment_hides_is_not_there(environment: dict[str, str], wanted: Cpu) -> None:
    assert read_cpu(f"model name\t: {AMX.name}\nflags\t\t: {' '.join(AMX.features)}\n", environment) == wanted


def test_without_a_cpuinfo_no_feature_is_claimed() -> None:
    assert read_cpu("", {}).features == ()


def test_this_processor_has_a_name() -> None:
    assert cpu().name
