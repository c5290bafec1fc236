"""Prints whether a hit among seven other requests gives the same bits when products are left to torch as it is."""

from __future__ import annotations

import tempfile
from pathlib import Path

from headwater.engine.selfcheck import self_check
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import load_model, read_spec
from tests.checkpoints import checkpoint
from tests.exactness.rig import Make
from tests.exactness.scenarios import AMPLE, with_seven_other_requests_running

if __name__ == "__main__":
    prepare_process(2)
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint(Path(folder), "qwen3_5")
        check = self_check(read_spec(path, "float32"), reproducible=False)
        numerics.use(Numerics(check.mode))
        make = Make(load_model(path, "float32"), check)
    answers = with_seven_other_requests_running(make)
    with make(AMPLE, cache=False) as reference:
        same = [answer.same_bits(reference.ask(answer.prompt, answer.max_tokens)) for answer in answers]
    print("same" if all(same) else "different")
