"""Builds of segments: what is stored has the same bits, whatever the steps' budgets were."""

from __future__ import annotations

import numpy as np
import pytest

from headwater.config import ServeConfig
from headwater.engine.engine import Engine
from tests.exactness.conftest import load  # noqa: F401  a fixture
from tests.exactness.rig import words
from tests.exactness.test_matrix import FAMILIES

LENGTH = 300  # tokens


def stored(model, budget: int) -> np.ndarray:
    """Return the bytes of a segment that was built in steps of `budget` tokens."""
    loaded, check = model
    config = ServeConfig(memory=200 * loaded.spec.page_bytes, max_tokens_per_step=budget)
    engine = Engine.over(loaded, check, config)
    engine.start()
    try:
        assert engine.warm_segments([tuple(words(LENGTH, "built"))], "") == ["stored"]
        (one,) = engine.scheduler.cache.segments
        return engine.runner.arena.pages.numpy()[[*one.kv, *one.state, *one.transition]].copy()
    finally:
        engine.stop()


OTHERS = [pytest.param(one, marks=pytest.mark.full) for one in FAMILIES if one != "qwen3_5"]


@pytest.mark.parametrize("family", ["qwen3_5", *OTHERS])
def test_a_segment_has_the_same_bits_with_every_budget(load, family) -> None:  # noqa: F811
    """With 64, the first leg computes the head alone."""
    model = load(family, "float32", 2)
    whole = stored(model, 512)
    for budget in (64, 128, 192):
        assert np.array_equal(stored(model, budget), whole), budget
