"""Headwater under the shared index benchmark, which loads the adapter by its path."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PAGE, KV_TOKENS, STATES = 64, 64 * 64, 8


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module as `bench_index.py --adapters index_adapter:Headwater` imports it: its folder is on the path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("index_adapter")


@pytest.mark.parametrize("name", ["Headwater", "HeadwaterSegLen", "HeadwaterLearned", "HeadwaterRequests"])
def test_cache_answers_as_the_benchmark_asks(adapter: Any, name: str) -> None:
    cache = getattr(adapter, name)(PAGE, KV_TOKENS, STATES)
    key = cache.prepare(np.arange(1000, dtype=np.int32))
    longer = cache.prepare(np.arange(1500, dtype=np.int32))
    assert cache.match(key) == (0, 0)
    cache.insert(key)
    assert cache.match(longer) == (960, 960)
    handle = cache.lock()
    cache.insert(longer, 960)
    cache.unlock(handle)
    assert cache.counts() == (1472, 2, 2)
    assert cache.evict_states(1) == 1
    assert cache.evict_kv(512) >= 512
    kv_tokens, states, _ = cache.counts()
    assert (kv_tokens, states) <= (1472 - 512, 1)


@pytest.mark.parametrize("name", ["Headwater", "HeadwaterSegLen", "HeadwaterLearned", "HeadwaterRequests"])
def test_full_cache_makes_room(adapter: Any, name: str) -> None:
    cache = getattr(adapter, name)(PAGE, KV_TOKENS, STATES)
    for seed in range(40):
        key = cache.prepare(np.random.default_rng(seed).integers(0, 150_000, 640, dtype=np.int32))
        hit = cache.match(key)[1]
        handle = cache.lock()
        kv_tokens, states = cache.free()
        if kv_tokens < 640 - hit:
            cache.evict_kv(640 - hit - kv_tokens)
        if not states:
            cache.evict_states(1)
        cache.insert(key, hit)
        cache.unlock(handle)
        assert cache.match(key) == (640, 640)
    kv_tokens, states, _ = cache.counts()
    assert 640 <= kv_tokens <= KV_TOKENS
    assert 1 <= states <= STATES
