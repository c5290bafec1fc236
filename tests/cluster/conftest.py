"""Patience of workers with each other: on a busy machine an answer is late, and its worker has not failed."""

import pytest

from headwater.cluster import peer_memory
from headwater.engine.tiers import prefix

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
def model(load):
    return load("qwen3_5", "float32", 2)
