"""The exactness matrix's core in a process of its own, whose environment may hold it down to a lesser processor.

`python -m tests.exactness.processor FAMILY:DTYPE:SCENARIO ...` prints one line a cell: whether each answer that hit has
the bits of a server without a cache, the self-check's finding and the layout of weights.
"""

import sys
import tempfile
from pathlib import Path

from headwater.engine.proof.selfcheck import self_check
from headwater.mixers import numerics
from headwater.mixers.linear import weight_layout
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import load_model, read_spec
from tests.checkpoints import checkpoint
from tests.exactness.rig import Make
from tests.exactness.scenarios import AMPLE, SCENARIOS


def run(root: Path, family: str, dtype: str, scenario: str) -> str:
    path = checkpoint(root, family)
    check = self_check(read_spec(path, dtype))
    numerics.use(Numerics(check.mode))
    make = Make(load_model(path, dtype), check)
    answers = SCENARIOS[scenario](make)
    assert any(answer.account.cached_tokens for answer in answers)
    with make(AMPLE, cache=False) as reference:
        same = [answer.same_bits(reference.ask(answer.prompt, answer.max_tokens)) for answer in answers]
    verdict = "same" if all(same) else "different"
    return f"{verdict}, {check.broken_by or 'deterministic'}, {weight_layout(check.mode)}"


if __name__ == "__main__":
    prepare_process(2)
    with tempfile.TemporaryDirectory() as folder:
        for cell in sys.argv[1:]:
            print(run(Path(folder), *cell.split(":")), flush=True)
