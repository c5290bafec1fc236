"""Memory for a step's largest intermediates, the same again and again: touching fresh memory costs 0.3 ms a MB.

X whatever the caller has.
"""

from __future__ import annotations

import math
import threading

import torch

_of_thread = threading.local()


def scratch(like_X: torch.Tensor) -> torch.Tensor:
    """Contiguous float32 memory of that shape, this thread's until it asks again; on a GPU, which keeps it, new memory.

    It grows with the largest that was asked for.
    """
    if like_X.device.type != "cpu":
        return torch.empty_like(like_X, dtype=torch.float32, memory_format=torch.contiguous_format)
    n = math.prod(like_X.shape)
    memory: torch.Tensor | None = getattr(_of_thread, "memory", None)
    if memory is None or len(memory) < n:
        with torch.inference_mode(False):  # to be written both within that mode and without
            memory = _of_thread.memory = torch.empty(n, device=like_X.device)
    return memory[:n].view(like_X.shape)
