"""Numerics of products, chosen so that a row's bits do not depend on the number of rows.

The self-check chooses them once, at start-up (`engine/proof/selfcheck.py`); weights are then laid out for them.
Decision 035 has the measurements.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from headwater import kernels, machine


@dataclass(frozen=True, slots=True)
class Numerics:
    """The way of all products of a process.

    `compiled`: kernels of Headwater's own, whose sums have one order at every height.
    `tiled`: torch's, of which every product has one of two fixed heights, the last tile filled up with zeros.
    `plain`: torch as it is, with no guard: rows may depend on their number (the negative control).
    """

    mode: str = "compiled"
    prefill_tile: int = 256  # rows
    decode_tile: int = 32  # rows

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"numerics mode {self.mode!r} is none of {', '.join(MODES)}")


MODES = ("compiled", "tiled", "plain")
# by oneDNN and by torch's layer over it, of those made for a shape and height: 0.7 MB each in bfloat16. Only products
# without a guard (mode plain) meet many heights, tiles meet two and kernels of our own none
CACHED_KERNELS = "256"
SPINS = "GOMP_SPINCOUNT"  # times that a thread of GNU's OpenMP looks for work before it sleeps: 40,000 take 0.5 ms
TINY = 2e-38  # a normal number, of which products with numbers below a half are denormal
PAUSE_HARD = 2  # of OpenMP's `omp_pause_resource_t`
_current = Numerics()


def current() -> Numerics:
    """Return the numerics for which weights are laid out from now on."""
    return _current


def use(numerics: Numerics) -> None:
    """Choose for the whole process. Call it before the first weight is loaded."""
    global _current
    _current = numerics


@contextmanager
def using(numerics: Numerics) -> Iterator[None]:
    """Choose numerics while a block runs, in which weights are laid out to be tried."""
    before = current()
    use(numerics)
    try:
        yield
    finally:
        use(before)


def prepare_process(threads: int | None = None) -> None:
    """Settings that hold only if they come before torch's first parallel operation and MKL's first call.

    Call it again on each thread that will run torch: its worker threads take over how it treats denormals.

    Strict reproducibility of MKL (unless MKL_CBWR is set already), denormals flushed to zero in every worker thread
    (transitions decay into denormals: slow, and rounded differently by different kernels), the thread count, which may
    exceed the processors, and how many kernels are kept (1,024 by default: with it only for oneDNN 250 prompts of any
    lengths took 930 MiB without guarded products, with it only for torch's layer 870, with neither 644).
    """
    os.environ.setdefault("MKL_CBWR", "AVX512,STRICT" if machine.cpu().avx512 else "AVX2,STRICT")
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, CACHED_KERNELS)
    torch.set_flush_denormal(True)
    threads = machine.quota_threads() if threads is None else threads
    if threads is not None:
        torch.set_num_threads(threads)
    if "numba" not in sys.modules:  # it starts its threads once
        os.environ.setdefault("NUMBA_NUM_THREADS", str(max(torch.get_num_threads(), machine.usable_cores())))
    if kernels.available():
        from headwater.kernels.compiling import use_threads

        n = torch.get_num_threads()
        use_threads(n)
        torch.set_num_threads(n)  # again: numba's first call sets the number for all that use OpenMP


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of floats are equal and have the same bits: NaN is not equal to NaN, nor 0 to -0.

    Bits are compared as integers, since this process flushes denormals: a comparison of floats takes them for zeros.
    """
    integers = torch.int16 if one.dtype.itemsize == 2 else torch.int32
    return torch.equal(one, other) and torch.equal(one.view(integers), other.view(integers))


def end_workers() -> None:
    """End the OpenMP workers of this thread, which computes no more. The next parallel operation starts new ones.

    GNU's OpenMP counts the workers of all threads. If there are more than processors they sleep at once when they have
    no work, and waking one takes some 20 µs, at each kernel of a decode step. The number of times that they look for
    work otherwise is 300,000 by default, which takes milliseconds from other processes: without SPINS workers stay.
    """
    if SPINS in os.environ:
        pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
        if pause is not None:
            pause(PAUSE_HARD)
