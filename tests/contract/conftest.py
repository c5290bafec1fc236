"""What all tests of mixers run in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Whatever torch allocates without filling it holds NaN."""
    torch.use_deterministic_algorithms(True)
    with torch.inference_mode():
        yield
    torch.use_deterministic_algorithms(False)
