"""Triton comes with the test extra; its interpreter is chosen in tests/conftest.py."""

import pytest

pytest.importorskip("triton", reason="no Triton here: it comes with the test extra")
