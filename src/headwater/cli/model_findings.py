"""What `headwater doctor` finds out with torch: whether this machine's kernels keep bits, and how fast they are."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from headwater.cli.findings import FAIL, OK, WARN, Finding, Intended
from headwater.engine.selfcheck import SelfCheck, self_check, weight_shapes
from headwater.errors import HeadwaterError
from headwater.mixers.linear import Linear, weight_layout
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.embedded import embedded
from headwater.models.load import read_spec
from headwater.spec import ModelSpec

BUILT_FOR = "2.13.0"  # the torch that the kernels were measured with
DTYPES = ("float32", "bfloat16")
ROWS = 256
MOST_SHAPES = 4  # that are timed
SECONDS = 0.2  # of timing one shape
LEAST_TIMES = 5  # the first ones are slow


def of_model(intended: Intended) -> Iterator[Finding]:
    prepare_process(intended.threads)
    yield of_torch()
    yield of_threads()
    yield from of_settings()
    yield of_gpu()
    for dtype in DTYPES:
        try:
            spec = read_spec(intended.model or embedded(), dtype, "cpu", 64)
        except (HeadwaterError, OSError) as error:
            yield Finding(f"model in {dtype}", FAIL, str(error), "give the folder of a checkpoint that is whole")
            return
        yield from of_dtype(spec)


def of_torch() -> Finding:
    have = torch.__version__
    build = f"{have}, kernels for {torch.backends.cpu.get_cpu_capability()}"
    libraries: tuple[tuple[str, Any], ...] = (("MKL", torch.backends.mkl), ("oneDNN", torch.backends.mkldnn))
    for name, library in libraries:
        build += f", {name} {'yes' if library.is_available() else 'no'}"
    if have.split("+")[0] != BUILT_FOR:
        return Finding("torch", WARN, build, f"measured with {BUILT_FOR}: the self-check below decides")
    return Finding("torch", OK, build)


def of_threads() -> Finding:
    threads, usable = torch.get_num_threads(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    if usable and threads > usable:
        return Finding("threads", WARN, f"{threads} on {usable} cores", f"--threads {usable}")
    return Finding("threads", OK, f"{threads}")


def of_settings() -> Iterator[Finding]:
    yield Finding("MKL_CBWR", OK, os.environ.get("MKL_CBWR", "not set"))
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA")
    if isa:
        yield Finding("ONEDNN_MAX_CPU_ISA", WARN, isa, "oneDNN is held to fewer instructions than the CPU may have")
    denormal = torch.tensor([1e-38]).mul_(1e-3).item()
    flushed = denormal == 0.0
    advice = "" if flushed else "decaying states become denormals, which are slow, and rounded in different ways"
    yield Finding("denormals", OK if flushed else WARN, "flushed to zero" if flushed else "kept", advice)


def of_gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("gpu", OK, "none that this torch can use; the CPU computes")
    return Finding("gpu", OK, ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))


def of_dtype(spec: ModelSpec) -> Iterator[Finding]:
    """The start-up self-check of a model's shapes in one dtype, and the speed of its products in the way chosen."""
    started = time.perf_counter()
    check = self_check(spec)
    took = time.perf_counter() - started
    name = f"{spec.model_type} in {spec.dtype_name}"
    layout = weight_layout(check.mode, getattr(torch, spec.dtype_name))
    told = f"deterministic, weights {layout} ({took:.1f} s)"
    if check.deterministic:
        yield Finding(name, OK, told)
    else:
        told = f"not deterministic: {check.broken_by}; weights {layout} ({took:.1f} s)"
        yield Finding(
            name, FAIL, told, "a hit may change an answer's last bits; try the other dtype, or other --threads"
        )
    yield Finding(f"products in {spec.dtype_name}", OK, speeds(spec, check))


def speeds(spec: ModelSpec, check: SelfCheck) -> str:
    """Of the largest weights, at a prefill's height and a decoding sequence's."""
    dtype = getattr(torch, spec.dtype_name)
    shapes = sorted(weight_shapes(spec), key=lambda shape: -shape[0] * shape[1])[:MOST_SHAPES]
    parts = []
    for n_in, n_out in shapes:
        linear = Linear(torch.randn(n_out, n_in).to(dtype), numerics=Numerics(check.mode))
        many, one = (seconds_of(linear, torch.randn(rows, n_in).to(dtype)) for rows in (ROWS, 1))
        gflops = 2 * ROWS * n_in * n_out / many / 1e9
        parts.append(f"{n_in}x{n_out}: {gflops:,.0f} GFLOP/s at {ROWS} rows, {1 / one:,.0f}/s at one")
    return "; ".join(parts)


def seconds_of(linear: Linear, x_RK: torch.Tensor) -> float:
    """Of one product, the best of as many as fit into half of SECONDS."""
    times: list[float] = []
    end = time.perf_counter() + SECONDS / 2
    while (start := time.perf_counter()) < end or len(times) < LEAST_TIMES:
        linear(x_RK)
        times.append(time.perf_counter() - start)
    return min(times)
