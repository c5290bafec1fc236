"""Compilation of kernels: numba's settings, and the folder for what it compiled.

Import this module before any kernel: it sets numba's threads to OpenMP's, which two callers may use at once.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import config

from headwater import machine
from headwater.cache_folder import own_folder
from headwater.kernels import recording

OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}
# for which processor numba compiles, if not for this one, and how far LLVM optimises
SETTINGS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_OPT")

log = logging.getLogger("headwater.kernels")

config.THREADING_LAYER = "omp"
if not os.environ.get("NUMBA_OPT"):
    config.OPT = type(config.OPT)(1)  # kernels are written in vectors: more makes none faster, and compiling slower


class Kernel:
    """A compiled function. Its calls are noted while a step is recorded."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled

    def __call__(self, *arguments: Any) -> None:
        self.compiled(*arguments)
        recorded = recording.current()
        if recorded is not None:
            recorded.note(self.compiled, arguments)


def kernel(function: Callable[..., Any]) -> Kernel:
    """Compile a function whose `prange` loops run on all threads. Calls release the GIL.

    An iteration must not depend on another; sums are those of `vectors.py`, or scalar ones in the order of the source.
    The index of a loop is unsigned: convert it before it is given to a part, which is compiled twice otherwise.
    """
    return Kernel(numba.njit(parallel=True, cache=_KEEPS, **OPTIONS)(function))


def serial_kernel(function: Callable[..., Any]) -> Kernel:
    """Compile a function that runs on one thread. Calls release the GIL."""
    return Kernel(numba.njit(cache=_KEEPS, **OPTIONS)(function))


def part(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call, for one thread."""
    return numba.njit(**OPTIONS)(function)


def lean_part(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call, for one thread, and that allocates nothing.

    Numba counts no references to its arrays then. A count is an atomic operation, and all threads count references to
    the same arrays: within the loop over a panel's spans counting took as long as the products of one row.
    """
    return numba.njit(_nrt=False, **OPTIONS)(function)


def use_threads(n: int) -> None:
    """Let kernels that are called from this thread use `n` threads."""
    numba.set_num_threads(min(n, config.NUMBA_NUM_THREADS))


def threads_in_use() -> int:
    """Return the number of threads of kernels that are called from this thread."""
    return int(numba.get_num_threads())


def key_of_code() -> str:
    """Return a digest of all that compiled kernels depend on: processor, compiler, and their sources."""
    texts = [*machine.identity(), *machine.cpu().features, *(os.environ.get(name, "") for name in SETTINGS)]
    texts += map(str, machine.versions("llvmlite", "numba").items())
    texts += (file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def keep_compiled() -> bool:
    """Let numba keep what it compiles in a folder of this user alone; False, with a line in the log, if there is none.

    NUMBA_CACHE_DIR, if it is set, stays.
    """
    if not os.environ.get("NUMBA_CACHE_DIR"):
        try:
            config.CACHE_DIR = str(own_folder("kernels", key_of_code()))
        except OSError as error:
            log.warning("kernels are compiled at each start, because the compiled ones cannot be kept: %s", error)
            return False
    return True


_KEEPS = keep_compiled()
