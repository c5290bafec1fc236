"""Findings of `headwater doctor` that need torch: exactness and speed of this machine's kernels."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from headwater.cli.machine_findings import FAIL, OK, SLOW, WARN, Finding, Intended
from headwater.cli.models import config_folder
from headwater.engine.proof.selfcheck import SelfCheck, weight_shapes
from headwater.engine.proof.verdict import verdict
from headwater.errors import CheckpointError, DownloadError
from headwater.machine import usable_cores
from headwater.mixers.linear import (
    Linear,
    answers_product,
    guarded_modes,
    prompts_product,
    seconds_of,
    slowdown,
    weight_layout,
)
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.mixers.products import product_dtype
from headwater.models.load import read_spec
from headwater.spec import ModelSpec

BUILT_FOR = "2.13.0"  # version of torch that the kernels were measured with
DTYPES = ("float32", "bfloat16")
TIMED_ROWS = 256
MAX_TIMED_SHAPES = 4  # shapes that are timed
HAS_TRITON = find_spec("triton") is not None


def of_model(intended: Intended) -> Iterator[Finding]:
    """Examine torch, and the model in each data type."""
    prepare_process(intended.threads)
    yield of_torch()
    yield of_kernels()
    yield of_threads()
    yield from of_settings()
    yield of_gpu()
    for dtype in DTYPES:
        try:
            spec = read_spec(config_folder(intended.model), dtype, "cpu", 64, intended.weights, intended.rope_scaling)
        except (CheckpointError, DownloadError, OSError) as error:
            yield Finding(f"model in {dtype}", FAIL, str(error), "give the folder of a complete checkpoint")
            return
        yield from of_dtype(spec, intended.recheck)


def of_torch() -> Finding:
    have = torch.__version__
    build = f"{have}, kernels for {torch.backends.cpu.get_cpu_capability()}"
    libraries: tuple[tuple[str, Any], ...] = (("MKL", torch.backends.mkl), ("oneDNN", torch.backends.mkldnn))
    for name, library in libraries:
        build += f", {name} {'yes' if library.is_available() else 'no'}"
    if have.split("+")[0] != BUILT_FOR:
        advice = f"the kernels were measured with {BUILT_FOR}: the self-check below decides"
        return Finding("torch", WARN, build, advice)
    return Finding("torch", OK, build)


def of_kernels() -> Finding:
    """Report whether numba compiles the kernels; torch computes more slowly."""
    if "compiled" in guarded_modes():
        return Finding("kernels", OK, "compiled by numba")
    advice = "install numba, whose wheels for Linux have OpenMP threads"
    found = "none: numba or its OpenMP threads are missing, so torch computes everything"
    measured = "7 times slower decoding at 16 bits and 30 times at 8 (one core, 38 M weights)"
    return Finding("kernels", SLOW, f"{found}: {measured}", advice)


def of_threads() -> Finding:
    threads, usable = torch.get_num_threads(), usable_cores()
    if threads > usable:
        return Finding("threads", WARN, f"{threads} on {usable} cores", f"--threads {usable}")
    return Finding("threads", OK, f"{threads}")


def of_settings() -> Iterator[Finding]:
    yield Finding("MKL_CBWR", OK, os.environ.get("MKL_CBWR", "not set"))
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA")
    if isa:
        yield Finding("ONEDNN_MAX_CPU_ISA", WARN, isa, "oneDNN uses fewer instructions than the CPU may have")
    denormal = torch.tensor([1e-38]).mul_(1e-3).item()
    flushed = denormal == 0.0
    advice = "" if flushed else "decaying states become denormals, which are slow and rounded differently"
    yield Finding("denormals", OK if flushed else WARN, "flushed to zero" if flushed else "kept", advice)


def of_gpu() -> Finding:
    """Report the GPUs that torch can use, and how to compute on them."""
    if not torch.cuda.is_available():
        return Finding("gpu", OK, "none that torch can use; the CPU computes")
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    if not HAS_TRITON:
        return Finding("gpu", WARN, f"{names}, but no Triton, which its kernels need", "pip install 'headwater[gpu]'")
    return Finding("gpu", OK, f"{names}, for --device cuda")


def of_dtype(spec: ModelSpec, recheck: bool = False) -> Iterator[Finding]:
    """Report the self-check of a model's shapes in one data type, kept or done now, and time its products."""
    started = time.perf_counter()
    check = verdict(spec, recheck=recheck)
    took = time.perf_counter() - started
    name = f"{spec.model_type} in {spec.dtype_name}"
    weights = f"weights in {spec.weights_held}, {weight_layout(check.mode)} ({took:.1f} s)"
    if check.proven is not None:
        yield Finding(name, OK, f"deterministic, proven {check.proven:%F %R} UTC, {weights}")
    else:
        advice = "a hit may change an answer's last bits; try the other --dtype, or fewer --threads"
        yield Finding(name, FAIL, f"not deterministic: {check.broken_by}; {weights}", advice)
    yield of_products(spec, check)


def of_products(spec: ModelSpec, check: SelfCheck) -> Finding:
    """Time the products, and compare those that this processor lacks with float32."""
    name, dtype = f"products in {spec.dtype_name}", getattr(torch, spec.dtype_name)
    if check.mode == "compiled" or product_dtype(dtype) == dtype:
        return Finding(name, OK, speeds(spec, check))
    factor = slowdown(*largest_shapes(spec)[0], dtype, Numerics(check.mode))
    advice = f"this CPU has none: {factor:.1f} times the time of float32; --dtype float32"
    return Finding(name, SLOW, speeds(spec, check), advice)


def largest_shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    return sorted(weight_shapes(spec), key=lambda shape: -shape[0] * shape[1])[:MAX_TIMED_SHAPES]


def speeds(spec: ModelSpec, check: SelfCheck) -> str:
    """Describe the speed of products with the largest weights, at the heights of prefill and of decode."""
    dtype = getattr(torch, spec.dtype_name)
    parts = []
    for n_in, n_out in largest_shapes(spec):
        linear = Linear(torch.randn(n_out, n_in).to(dtype), numerics=Numerics(check.mode))
        many = seconds_of(prompts_product(linear), torch.randn(TIMED_ROWS, n_in).to(dtype))
        one = seconds_of(answers_product(linear), torch.randn(1, n_in).to(dtype))
        gflops = 2 * TIMED_ROWS * n_in * n_out / many / 1e9
        parts.append(f"{n_in}x{n_out}: {gflops:,.0f} GFLOP/s at {TIMED_ROWS} rows, {1 / one:,.0f} products/s at 1 row")
    return "; ".join(parts)
