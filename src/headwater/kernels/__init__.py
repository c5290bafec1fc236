"""Kernels for the CPU, compiled by numba: the decoding of tokens, and products with weights of all formats."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module

# numbers of nf4 (Dettmers et al., 2023, appendix E): quantiles of a normal distribution, 0 and the ends among them
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# numbers of bitsandbytes' fp4: 0, 1/16, 8, 12, 4, 6, 2 and 3 over 12, in float32, then their negatives
FP4 = (
    0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
    0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
)  # fmt: skip
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
