"""The negative control: a hit among seven other requests when products are left to torch as it is.

`python -m tests.exactness.unguarded FOLDER FORMAT ...` prints for each format of weights whether all bits are the same.
The checkpoint is below FOLDER, or written there.
"""

import sys
from pathlib import Path

from headwater.engine.proof.selfcheck import self_check
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.load import load_model, read_spec
from tests.exactness.formats import stored
from tests.exactness.rig import Make
from tests.exactness.scenarios import AMPLE, with_seven_other_requests_running


def run(root: Path, form: str) -> str:
    path, weights = stored(root, "qwen3_5", form)
    check = self_check(read_spec(path, "float32", weights=weights), reproducible=False)
    numerics.use(Numerics(check.mode))
    make = Make(load_model(path, "float32", weights=weights), check)
    answers = with_seven_other_requests_running(make)
    with make(AMPLE, cache=False) as reference:
        same = [answer.same_bits(reference.ask(answer.prompt, answer.max_tokens)) for answer in answers]
    return "same" if all(same) else "different"


if __name__ == "__main__":
    prepare_process(2)
    for form in sys.argv[2:]:
        print(run(Path(sys.argv[1]), form), flush=True)
