"""Kernels for the CPU, compiled by numba: the decoding of tokens, and products with weights of all formats."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module

log = logging.getLogger("headwater.kernels")


@cache
def available() -> bool:
    """Return whether kernels can run: numba is installed, with threads that two callers may use at once (OpenMP's).

    Without them torch computes everything, and more slowly.
    """
    try:
        import_module("numba.np.ufunc.omppool")
    except ImportError as error:
        log.warning("torch computes everything, because numba or its OpenMP threads are missing: %s", error)
        return False
    return True
