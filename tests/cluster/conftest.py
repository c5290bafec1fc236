"""Patience of workers with each other: on a busy machine an answer is late, and its worker has not failed."""

import pytest

from headwater.cluster import peer_memory
from headwater.engine.tiers import prefix
from tests.exactness.conftest import load, same_bits_as_without_a_cache  # noqa: F401  fixtures
from tests.exactness.rig import Make

PEER_SECONDS = 30.0


@pytest.fixture(autouse=True)
def patient_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "FIND_SECONDS", PEER_SECONDS)
    monkeypatch.setattr(peer_memory, "PART_SECONDS", PEER_SECONDS)


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of KV of 256 tokens, so that prompts of few pages have several."""
    monkeypatch.setattr(prefix, "RUN_TOKENS", 256)


@pytest.fixture
def make(load) -> Make:  # noqa: F811
    return Make(*load("qwen3_5", "float32", 2))


@pytest.fixture
def model(load):  # noqa: F811
    return load("qwen3_5", "float32", 2)
