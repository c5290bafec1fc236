"""Tests that need a card: `GPU=1 make test-card`. Without one, or with Triton's interpreter, none is collected."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.exactness.loading import Load, loading

DEVICE = os.environ.get("HEADWATER_TEST_CARD", "cuda")  # cpu: do these tests start?
if DEVICE == "cuda" and (os.environ.get("TRITON_INTERPRET") != "0" or not torch.cuda.is_available()):
    collect_ignore_glob = ["test_*"]


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """(recipe, dtype, threads, format of weights) -> the model on the card, and what the self-check said."""
    yield from loading(tmp_path_factory.mktemp("card"), DEVICE)
