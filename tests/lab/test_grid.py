"""Rows in processes: one that is killed is named, and nothing is left of them, so the end prints no traceback."""

from __future__ import annotations

import multiprocessing
import os
import threading
from functools import partial

import pytest

import headwater.lab.replay as grid
from headwater.errors import HeadwaterError
from headwater.lab.setup import Setup
from headwater.traces.loads import make_arrivals
from tests.lab.test_virtual_clock import PAGE, PROFILE, sessions


def test_killed_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "replay", lambda *arguments: os._exit(9))
    setups = [Setup(PROFILE, 10**9, page_size=PAGE)] * 2
    with pytest.raises(HeadwaterError, match="one of 2 processes was killed"):
        list(grid.run_grid(sessions(1), setups, partial(make_arrivals, spelling="poisson(rate=1)"), jobs=2))


@pytest.mark.parametrize("rows", [1, 3])
def test_no_process_and_no_thread_is_left(rows: int) -> None:
    threads, processes = set(threading.enumerate()), set(multiprocessing.active_children())
    setups = [Setup(PROFILE, 10**9, page_size=PAGE)] * 3
    found = grid.run_grid(sessions(1), setups, partial(make_arrivals, spelling="poisson(rate=1)"), jobs=2)
    for _ in range(rows):
        next(found)
    found.close()  # type: ignore[attr-defined]
    assert not set(threading.enumerate()) - threads
    assert not set(multiprocessing.active_children()) - processes
