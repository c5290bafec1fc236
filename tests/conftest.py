"""What all tests share: the server's process settings, which hold only if they come before torch computes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.mixers.numerics import prepare_process
from tests import checkpoints

prepare_process(2)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a named recipe's checkpoint; kept between runs in HEADWATER_TEST_CHECKPOINTS, where that is set."""
    kept = os.environ.get("HEADWATER_TEST_CHECKPOINTS")
    root = Path(kept) if kept else tmp_path_factory.mktemp("checkpoints")
    return lambda name: checkpoints.checkpoint(root, name)
