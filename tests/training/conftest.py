"""Batches are drawn by forked processes in this folder, but for those of the command in `test_training_run.py`."""

import multiprocessing
from types import SimpleNamespace

import pytest

from tests.forked import IMPORTED
from training import batches


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork them from the process that `forked.py` forks servers from. Otherwise each imports torch: 3 seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    monkeypatch.setattr(batches, "multiprocessing", SimpleNamespace(get_context=lambda method: context))
    monkeypatch.setattr(batches, "LOOKED_EVERY", 0.2)
