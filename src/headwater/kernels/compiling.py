"""Compilation of kernels: numba's settings, and the folder for what it compiled.

Import this module before any kernel: it sets numba's threads to OpenMP's, which two callers may use at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import config
from numba.core.caching import FunctionCache
from numba.core.compiler import Compiler

from headwater import machine
from headwater.cache_folder import own_folder
from headwater.kernels import recording


def _compilers() -> tuple[Any, Any]:
    """Return the compilers of kernels and of their parts; numba's own, if it has not got what `linking` needs."""
    try:
        from headwater.kernels.linking import KernelCompiler, PartCompiler
    except ImportError:
        return Compiler, Compiler
    return KernelCompiler, PartCompiler


KERNELS, PARTS = _compilers()
OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}
OUTER = {**OPTIONS, "pipeline_class": KERNELS}
# of a function that only kernels call: numba's code for calls from Python and C would be a sixth of all compiling
INNER = {**OPTIONS, "pipeline_class": PARTS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
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
    return _kept(numba.njit(parallel=True, **OUTER)(function))


def serial_kernel(function: Callable[..., Any]) -> Kernel:
    """Compile a function that runs on one thread. Calls release the GIL."""
    return _kept(numba.njit(**OUTER)(function))


def _kept(compiled: Any) -> Kernel:
    if _KEEPS:
        compiled._cache = CompiledOnce(compiled.py_func)  # as numba's `enable_caching` does
    return Kernel(compiled)


class CompiledOnce(FunctionCache):
    """Files with a compiled kernel. One process at a time compiles it: others wait, and load it then.

    A file that is cut off or broken is compiled and written again; one that cannot be written is left out.
    """

    _lock: int | None = None  # descriptor of the locked file, from a miss until the compiled code is stored

    def load_overload(self, signature: Any, target: Any) -> Any:
        found = self._found(signature, target)
        if found is None and self._lock is None:
            self._lock = self._locked()
            found = self._found(signature, target)
            if found is not None:
                self._unlock()
        return found

    def save_overload(self, signature: Any, compiled: Any) -> None:
        try:
            super().save_overload(signature, compiled)
        except OSError as error:
            _warn_of_unkept(error.strerror)
        finally:
            self._unlock()

    def _found(self, signature: Any, target: Any) -> Any:
        """Return the kept code, or None; if its files are broken they are emptied."""
        try:
            return super().load_overload(signature, target)
        except Exception as error:  # bytes that are cut off may raise anything
            name = self._impl.filename_base
            log.warning("the kept kernel %s cannot be read, so it is compiled again: %s", name, error)
            with suppress(OSError):
                self.flush()
            return None

    def _locked(self) -> int | None:
        file = Path(self.cache_path, f"{self._impl.filename_base}.lock")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # nothing can be kept there: each process compiles for itself
            return None
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@cache
def _warn_of_unkept(reason: str) -> None:
    log.warning("kernels that are compiled now cannot be kept for later starts: %s", reason)


def part(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call, for one thread. Python cannot call it."""
    return numba.njit(**INNER)(function)


def lean_part(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call, for one thread, and that allocates nothing. Python cannot call it.

    Numba counts no references to its arrays then. A count is an atomic operation, and all threads count references to
    the same arrays: within the loop over a panel's spans counting took as long as the products of one row.
    """
    return numba.njit(_nrt=False, **INNER)(function)


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
    """Let numba store compiled code in a folder of this user only; False, with a line in the log, if there is none.

    NUMBA_CACHE_DIR, if it is set, stays.
    """
    if not os.environ.get("NUMBA_CACHE_DIR"):
        try:
            config.CACHE_DIR = str(own_folder("kernels", key_of_code()))
        except OSError as error:
            log.warning("kernels are compiled at each start, because the compiled ones cannot be kept: %s", error)
            return False
    return True


def none_kept() -> bool:
    """Return whether kernels can be kept and none is yet: this machine's first start, or the first of a version."""
    return _KEEPS and not any(Path(config.CACHE_DIR).rglob("*.nbi"))


_KEEPS = keep_compiled()
