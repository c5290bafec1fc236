"""Triton comes with the test extra; its interpreter is chosen in tests/conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("triton", reason="no Triton here: it comes with the test extra")


@pytest.fixture(autouse=True, scope="session")
def _large_programs() -> Iterator[None]:
    """Products in programs of many rows and outputs: the interpreter takes 9 ms for one, and runs them in turn."""
    from headwater.mixers.gpu import product  # needs Triton

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product, "OUTPUTS", 256)
        patch.setattr(product, "HEIGHT", 512)
        yield
