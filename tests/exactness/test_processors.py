"""A hit changes no bit on lesser processors either: each is a process held down by its libraries' own settings.

Their kernels take half a minute to compile, so these are full tests; quick ones are in `kernels/test_compiling.py`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from headwater.machine import cpu
from headwater.mixers.linear import guarded_modes, weight_layout
from tests import processors
from tests.exactness.scenarios import SCENARIOS

ROOT = Path(__file__).parents[2]
FAMILIES = (
    "qwen3_5", "granite", "kimi_linear", "ring", "jamba", "qwen3_window", "qwen3_5_moe", "gpt_oss", "olmo_hybrid",
    "lara_mini",
)  # fmt: skip
LESSER = ("AVX2", "AVX-512")
DTYPES = ("float32", "bfloat16")


def lines(processor: str, *cells: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.exactness.processor", *cells],
        cwd=ROOT, env=processors.environment(processor), capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("processor", [name for name in processors.had() if name in LESSER])
def test_a_hit_changes_no_bit_on_a_lesser_processor(processor, dtype):
    assert lines(processor, f"qwen3_5:{dtype}:chat_turn") == [
        f"same, deterministic, {weight_layout(guarded_modes()[0])}"
    ]


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("processor", processors.had())
def test_every_scenario_on_every_processor_that_is_had(processor, family, dtype):
    found = lines(processor, *(f"{family}:{dtype}:{scenario}" for scenario in SCENARIOS))
    assert [line.split(", ")[:2] for line in found] == [["same", "deterministic"]] * len(SCENARIOS)


def test_the_processor_of_this_machine_is_among_those_that_are_pretended():
    assert set(processors.had()) >= ({"AVX2"} if "avx2" in cpu().features else set())
