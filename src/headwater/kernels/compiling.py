"""Compilation of kernels: numba's settings, and the folder for what it compiled.

Import this module before any kernel: it sets numba's threads to OpenMP's, which two callers may use at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba
from numba import config

log = logging.getLogger("headwater.kernels")

config.THREADING_LAYER = "omp"
OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function whose `prange` loops run on all threads. Calls release the GIL.

    An iteration must not depend on another; sums are those of `vectors.py`, or scalar ones in the order of the source.
    """
    return numba.njit(parallel=True, cache=True, **OPTIONS)(function)


def part(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call, for one thread."""
    return numba.njit(**OPTIONS)(function)


def use_threads(n: int) -> None:
    """Let kernels that are called from this thread use `n` threads."""
    numba.set_num_threads(min(n, config.NUMBA_NUM_THREADS))


def threads_in_use() -> int:
    """Return the number of threads of kernels that are called from this thread."""
    return int(numba.get_num_threads())
