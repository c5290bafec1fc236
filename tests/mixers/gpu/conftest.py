"""Kernels run in Triton's interpreter, on the CPU: it must be chosen before they are made."""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="no Triton here: it comes with the test extra")
