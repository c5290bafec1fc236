"""Kernels for the CPU, compiled by numba: the decoding of tokens, and products with weights of all formats."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def available() -> bool:
    """Return whether numba is installed; without it torch computes everything, and more slowly."""
    return find_spec("numba") is not None
