"""Settings of the process that must come before anything is computed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Every worker thread multiplies a part of the smallest normal number by a half: a denormal, unless it is flushed.
SCRIPT = """
import os, threading, torch
from headwater.mixers.numerics import prepare_process
prepare_process(2)
def all_flushed():
    prepare_process(2)
    x = torch.full((1 << 20,), torch.finfo(torch.float32).tiny)
    flushed.append(not (x * 0.5).any().item())
flushed = []
all_flushed()
thread = threading.Thread(target=all_flushed)
thread.start()
thread.join()
print(os.environ["MKL_CBWR"], torch.get_num_threads(), *flushed)
"""


@pytest.mark.parametrize(("given", "wanted"), [(None, "STRICT"), ("COMPATIBLE", "COMPATIBLE")])
def test_strict_mode_threads_and_flushed_denormals_in_every_thread(given: str | None, wanted: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    env |= {"MKL_CBWR": given} if given else {}
    out = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True).stdout
    mode, threads, *flushed = out.split()
    assert mode.endswith(wanted)
    assert (threads, flushed) == ("2", ["True", "True"])
