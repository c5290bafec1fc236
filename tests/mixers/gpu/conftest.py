"""Triton comes with the test extra; its interpreter is chosen in tests/conftest.py, and blocks are wide for it."""

import pytest

pytest.importorskip("triton", reason="no Triton here: it comes with the test extra")


@pytest.fixture(autouse=True)
def _wide_blocks(wide_blocks: None) -> None:
    """Use wide blocks in all tests of this folder; those of products choose others."""
