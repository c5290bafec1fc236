"""Is a composed state the state of one pass, at the first layer and the deepest, and what does addition alone cost?

    python -m benchmarks.segment_states [hypic-layer0] [hypic-table2] [hypic-table4] [hypic-3] [--out docs/results]

Writes the first layer's fidelity, tables 2 and 4 and figure 3 of HYPIC as `python -m papers` would.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from headwater.cli.common import prepare_outputs
from headwater.lab.fidelity.figures import Distance
from headwater.lab.fidelity.measures import distance, studied
from headwater.lab.fidelity.prompts import Wanted
from headwater.layers.lightning import Lightning
from headwater.mixers.numerics import prepare_process
from headwater.models.files import embedded
from headwater.request import Fidelity
from papers import FIGURES
from papers.figure import Found
from papers.hypic import measured
from papers.hypic.measured import DECAYS, LAYER_TOKENS, LENGTHS, SEGMENTS, TRAINED
from papers.lab import Lab, document, write
from papers.results import refuse_dirty_tree
from tests import checkpoints
from tests.contract.layer_rig import LayerRig, Piece
from tests.contract.recurrences import MIXERS, RECURRENCES, Case
from tests.contract.recurrences.case import WIDTH, tokens

SLOT = 5
RANDOM = {"random Qwen3.5": "qwen3_5_bench", "random Ring": "ring_biases"}  # recipes of checkpoints


def first_layer() -> Found:
    """The largest drift of each kind's shapes."""
    exact: dict[str, Distance] = {}
    rounded: dict[str, Distance] = {}
    for name, case in MIXERS.items():
        kind = name.partition(",")[0]
        if kind == "short_conv":  # not of the paper: its transition is a number of tokens, which bfloat16 holds exactly
            continue
        for worst, found in zip((exact, rounded), drifts_of(case), strict=True):
            worst[kind] = max(worst.get(kind, found), found, key=lambda one: one.error)
    return measured.first_layer(exact, rounded)


def drifts_of(case: Case) -> tuple[Distance, Distance]:
    """Return the drift with all segments but the first composed, with transitions in float32 and in bfloat16."""
    rig, x_LD, each = LayerRig(case), tokens(LAYER_TOKENS), LAYER_TOKENS // SEGMENTS
    head = getattr(case.layer, "conv", 1) - 1  # what a convolution looks back is computed anew
    for start in range(each, LAYER_TOKENS, each):
        rig.make(x_LD[start : start + each], head, 0)
    _, wanted_X = case.reference(x_LD)
    exact = composed_state(rig, x_LD, each, head)
    segments = tuple(replace(s, transition_X=s.transition_X.bfloat16().float()) for s in rig.state.segments)  # type: ignore[union-attr]
    rig.state = replace(rig.state, segments=segments)
    rounded = composed_state(rig, x_LD, each, head)
    return distance(exact, wanted_X), distance(rounded, wanted_X)


def composed_state(rig: LayerRig, x_LD: torch.Tensor, each: int, head: int) -> torch.Tensor:
    pieces = [Piece(x_LD[: each + head], SLOT)]
    for i in range(1, SEGMENTS):
        first = (i + 1) * each
        pieces.append(Piece(x_LD[first : first + head], SLOT, first, composes=((i - 1, i * each),)))
    rig.step(pieces)
    return rig.state.recurrent[SLOT].clone()


def deepest() -> Found:
    """Measure the deepest state's drift of the embedded model and of random weights."""
    with tempfile.TemporaryDirectory() as scratch:
        models = {name: checkpoints.checkpoint(Path(scratch), recipe) for name, recipe in RANDOM.items()}
        models = {TRAINED: embedded(), **models}
        skipped, within = ({name: _deepest(path, skip) for name, path in models.items()} for skip in (True, False))
    return measured.deepest(skipped, within)


def _deepest(model: Path, skip_attention: bool) -> Distance:
    wanted = Wanted(cut=measured.TOKENS, parts=measured.PARTS)
    layers = studied(model, ("float32", "auto"), 1, wanted, [Fidelity.W0], skip_attention).means["w0"].states
    return layers[max(layers)]


def boundaries() -> Found:
    found = studied(embedded(), ("float32", "auto"), 1, Wanted(), [Fidelity.W0], False).deviations
    return measured.boundaries({f"layer {layer}": places for layer, places in found.items()})


def addition() -> Found:
    """One head for each decay: the error of adding a segment's state to a state that its tokens never touched."""
    slopes = tuple(-math.log1p(-(2.0**-n)) for n in DECAYS)
    found = {}
    for length in LENGTHS:
        rig = LayerRig(Case(Lightning(WIDTH, len(slopes), 16, slopes), RECURRENCES["lightning"]))
        rig.make(tokens(length), 0, 0)
        (segment,) = rig.state.segments
        state_HKV = torch.randn(segment.zero_start_X.shape, generator=torch.Generator().manual_seed(0))
        right = rig.layer.composed(state_HKV, segment, 0)
        added = rig.layer.composed(state_HKV, replace(segment, transition_X=None), 0)
        error_H = (right - added).flatten(1).norm(dim=1) / state_HKV.flatten(1).norm(dim=1)
        found |= {(n, length): float(error) for n, error in zip(DECAYS, error_H, strict=True)}
    return measured.addition(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of figures; all")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    given = parser.parse_args()
    prepare_outputs(folders=[given.out])
    refuse_dirty_tree(given.out)
    prepare_process(1)
    work: dict[str, Callable[[], Found]] = {
        "hypic-layer0": first_layer,
        "hypic-table2": addition,
        "hypic-table4": deepest,
        "hypic-3": boundaries,
    }
    for name, run in work.items():
        if given.names and name not in given.names:
            continue
        begin = time.perf_counter()
        written = document(FIGURES[name], Lab(), run(), time.perf_counter() - begin)
        write(written, given.out)
        print(name, *(f"{shape['says']}: {shape['holds']}" for shape in written["shapes"]), sep="\n  ")


if __name__ == "__main__":
    main()
