"""Settings of a process before torch is imported, for speed on a shared CPU."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's mallopt


def settle() -> None:
    """Keep freed memory, which would otherwise be requested again and zeroed each step; waiting threads sleep."""
    os.environ.setdefault("GOMP_SPINCOUNT", "100")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc's
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_TOP_PAD, 1 << 28)
