"""Triton comes with the test extra; its interpreter is chosen in tests/conftest.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="no Triton here: it comes with the test extra")

from headwater.mixers import gpu


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Chooses the GPU's path for tensors on the CPU, in Triton's interpreter, or the CPU's."""
    return lambda on_gpu: monkeypatch.setattr(gpu, "DEVICES", ("cpu",) if on_gpu else ())
