"""The tests that need a card start without one, and ask for what the CPU gives, too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_card_tests_pass_on_a_cpu() -> None:
    command = [sys.executable, "-m", "pytest", "tests/card", "-k", "qwen3_5-float32 or reuse_raw"]
    ran = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"HEADWATER_TEST_CARD": "cpu"}, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "10 passed" in ran.stdout
