"""Fixtures of all mixer tests."""

from collections.abc import Iterator

import pytest
import torch

from tests.contract.recurrences import MIXERS, Case


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Whatever torch allocates without filling it holds NaN."""
    torch.use_deterministic_algorithms(True)
    with torch.inference_mode():
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Layers as small as these are slower with two, and much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=MIXERS)
def mixer(request: pytest.FixtureRequest) -> Case:
    return MIXERS[request.param]
