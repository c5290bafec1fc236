"""Layers on a GPU's path, in Triton's interpreter: held to what they do on the CPU, and to their own bits."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from headwater.layers.attention import Rotary
from headwater.layers.gdn import DeltaNet
from headwater.layers.kda import DeltaAttention
from headwater.layers.layer import Layer
from headwater.layers.lightning import Lightning
from headwater.layers.mamba import Mamba
from headwater.layers.mamba2 import Mamba2
from headwater.layers.short_conv import ShortConv
from headwater.mixers.batch import STATE, StepBatch
from headwater.mixers.gdn import GatedDeltaNet
from headwater.mixers.gpu.recurrent import KERNELS, RecurrentOnGpu
from headwater.mixers.kda import KimiDeltaAttention
from headwater.mixers.lightning import LightningAttention
from headwater.mixers.mamba import SelectiveStateSpace
from headwater.mixers.mamba2 import StateSpaceDual
from headwater.mixers.recurrent import LayerState, RecurrentMixer, SegmentState
from headwater.mixers.short_conv import GatedShortConvolution
from headwater.mixers.slices import Slice
from headwater.mixers.weights import Weights

WIDTH, ROWS = 32, 12
NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Case:
    """A layer, and the class that computes it."""

    shape: Layer
    mixer: Callable[..., RecurrentMixer]
    kernels: bool = True  # else its chunks are those of the CPU


CASES = {
    "gated_delta_net": Case(DeltaNet(WIDTH, 2, 4, 16, 24, 4), GatedDeltaNet),
    "gated_delta_net, odd": Case(DeltaNet(WIDTH, 3, 3, 24, 40, 2), GatedDeltaNet),
    "delta_attention": Case(DeltaAttention(WIDTH, heads=3, head_dim=24, conv=4), KimiDeltaAttention),
    "mamba2": Case(Mamba2(WIDTH, heads=4, head_dim=16, state=24, groups=2, conv=4), StateSpaceDual),
    "mamba2, odd": Case(Mamba2(WIDTH, 3, 40, 16, 1, 3, normed=False, conv_bias=False), StateSpaceDual),
    "lightning": Case(Lightning(WIDTH, 2, 16, (0.1, 0.02), rotary=Rotary(8, 1e4)), LightningAttention, kernels=False),
    "mamba": Case(Mamba(WIDTH, inner=24, state=8, conv=4, step_rank=6), SelectiveStateSpace),
    "short_conv": Case(ShortConv(WIDTH, conv=3), GatedShortConvolution),
    "mamba, odd": Case(Mamba(WIDTH, 70, 5, 3, 6, normed=True, conv_bias=False), SelectiveStateSpace),
}


# Odd widths are held to the CPU's results in `make test`; their cuts, transitions and compositions are behind the mark.
ODD_IN_FULL = pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.full] if "odd" in name else []) for name in CASES], indirect=True
)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def layer(case: Case) -> RecurrentMixer:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(size, generator=generator) * 0.3 for name, size in case.shape.tensors().items()}
    layer = case.mixer(case.shape, Weights(tensors))
    assert (type(layer) in KERNELS) == case.kernels
    return layer


@pytest.fixture
def run(layer: RecurrentMixer) -> Callable[..., torch.Tensor]:
    """The layer's forward, on the GPU's path or the CPU's."""
    on_gpu = RecurrentOnGpu(layer)

    def forward(x_ND: torch.Tensor, batch: StepBatch, state: LayerState, gpu: bool = True) -> torch.Tensor:
        with torch.inference_mode():
            return (on_gpu if gpu else layer).forward(x_ND, batch, state)

    return forward


def state_of(case: Case) -> LayerState:
    """NaN where nothing was written; rows are strided, as in the state memory."""
    nan = {name: torch.full((ROWS, 2, *shape), float("nan"))[:, 0] for name, shape in case.shape.states}
    return LayerState(nan["recurrent"], nan.get("conv"))


def clear(state: LayerState, *rows: int) -> None:
    for row in rows:
        state.recurrent[row] = 0
        if state.conv is not None:
            state.conv[row] = 0


def step_of(slices: list[Slice], decode_slots: list[int], positions: list[int]) -> StepBatch:
    """Build a step; adjacent decoding rows with the same slot are tokens of one sequence."""
    position_N, n = torch.tensor(positions, dtype=torch.int64), len(decode_slots)
    parents = tuple(row - 1 if row and decode_slots[row - 1] == decode_slots[row] else STATE for row in range(n))
    return StepBatch(NONE, position_N, tuple(slices), torch.tensor(decode_slots), (NONE,) * n, NONE, parents=parents)


def tokens(n: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_prefill_saves_and_decode_are_those_of_the_cpu(case: Case, run: Callable[..., torch.Tensor]) -> None:
    lengths, slots = (150, 2, 64), (4, 0, 7)
    x_ND, outs, states = tokens(sum(lengths) + 2), [], []
    for gpu in (False, True):
        state = state_of(case)
        clear(state, *slots)
        first = (0, 150, 152)
        saves = ((64, 8), (128, 9))
        slices = [
            Slice(f, n, 0, slot, NONE, 0, saves if n == 150 else ())
            for f, n, slot in zip(first, lengths, slots, strict=True)
        ]
        positions = [p for n in lengths for p in range(n)]
        out = run(x_ND[:-2], step_of(slices, [], positions), state, gpu)
        for i in (2, 1):
            x_BD = torch.stack((x_ND[-i], -x_ND[-i]))
            out = torch.cat((out, run(x_BD, step_of([], [7, 4], [64, 150]), state, gpu)))
        outs.append(out)
        states.append(state)
    assert (outs[0] - outs[1]).abs().max() < 1e-5 * outs[0].abs().max()
    for row in (*slots, 8, 9):
        of_cpu, of_gpu = (s.recurrent[row] for s in states)
        assert (of_cpu - of_gpu).abs().max() < 1e-5 * of_cpu.abs().max().clamp_min(1e-3)
        if states[0].conv is not None:
            assert torch.equal(states[0].conv[row], states[1].conv[row])
    untouched = [row for row in range(ROWS) if row not in (*slots, 8, 9)]
    assert states[1].recurrent[untouched].isnan().all()


@ODD_IN_FULL
@pytest.mark.parametrize("cut", [64, pytest.param(128, marks=pytest.mark.full)])
def test_cuts_and_company_change_no_bit(case: Case, run: Callable[..., torch.Tensor], cut: int) -> None:
    x_LD, y_LD = tokens(170), tokens(70, 2)
    whole, parts = state_of(case), state_of(case)
    clear(whole, 1)
    clear(parts, 5, 2)
    wanted = run(x_LD, step_of([Slice(0, 170, 0, 1, NONE, 0)], [], list(range(170))), whole)
    first = run(x_LD[:cut], step_of([Slice(0, cut, 0, 5, NONE, 0)], [], list(range(cut))), parts)
    slices = [Slice(0, 70, 0, 2, NONE, 0), Slice(70, 170 - cut, cut, 5, NONE, 0)]
    positions = [*range(70), *range(cut, 170)]
    second = run(torch.cat((y_LD, x_LD[cut:])), step_of(slices, [], positions), parts)
    assert torch.equal(torch.cat((first, second[70:])), wanted)
    assert torch.equal(whole.recurrent[1], parts.recurrent[5])
    x_BD = tokens(3, 3)
    alone = run(x_BD[:1], step_of([], [1], [170]), whole)
    among = run(x_BD.flip(0)[1:], step_of([], [2, 5], [70, 170]), parts)
    assert torch.equal(alone[0], among[1])


def known_tokens(
    case: Case, run: Callable[..., torch.Tensor], steps: list[list[int]]
) -> tuple[torch.Tensor, LayerState]:
    """Decode 3 tokens of one sequence, 1 of another and 2 of a third, these rows together in each step."""
    state, x_ND, slots, positions = state_of(case), tokens(6), [4, 4, 4, 0, 7, 7], [9, 10, 11, 0, 3, 4]
    clear(state, *slots)
    outs = [
        run(x_ND[rows], step_of([], [slots[i] for i in rows], [positions[i] for i in rows]), state) for rows in steps
    ]
    return torch.cat(outs), state


IN_TURN, AT_ONCE = [[row] for row in range(6)], [[*range(6)]]


def same_known_tokens(case: Case, run: Callable[..., torch.Tensor]) -> bool:
    (wanted, before), (got, after) = (known_tokens(case, run, steps) for steps in (IN_TURN, AT_ONCE))
    states = [(before.recurrent, after.recurrent), (before.conv, after.conv)]
    return torch.equal(got, wanted) and all(
        torch.equal(one[[4, 0, 7]], other[[4, 0, 7]]) for one, other in states if one is not None
    )


def test_layers_of_several_tokens_in_one_step_equal_them_in_turn(
    case: Case, run: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert same_known_tokens(case, run)
    parts = StepBatch.__dict__["decode_parts"].func
    monkeypatch.setattr(StepBatch, "decode_parts", property(lambda batch: parts(batch)[::-1]))
    assert not same_known_tokens(case, run), "control: later rows of a sequence first"


@ODD_IN_FULL
def test_a_transition_is_that_of_the_cpu_and_changes_no_bit(
    case: Case, layer: RecurrentMixer, run: Callable[..., torch.Tensor]
) -> None:
    x_LD, y_LD = tokens(150), tokens(70, 2)
    plain, transitions = state_of(case), []
    clear(plain, 1)
    wanted = run(x_LD, step_of([Slice(0, 150, 0, 1, NONE, 0)], [], list(range(150))), plain)
    first = step_of([Slice(0, 64, 0, 4, NONE, 0, (), 3)], [], list(range(64)))
    second = [Slice(0, 70, 0, 2, NONE, 0), Slice(70, 86, 64, 4, NONE, 0, (), 3)]
    for gpu in (False, True):
        state = replace(state_of(case), transition=torch.stack([layer.identity()] * 5))
        clear(state, 2, 4)
        before = run(x_LD[:64], first, state, gpu)
        after = run(torch.cat((y_LD, x_LD[64:])), step_of(second, [], [*range(70), *range(64, 150)]), state, gpu)
        transitions.append(state.transition)
    assert torch.equal(torch.cat((before, after[70:])), wanted)
    assert torch.equal(state.recurrent[4], plain.recurrent[1])
    assert torch.equal(transitions[0], transitions[1])
    changed = [not torch.equal(t, layer.identity()) for t in transitions[1]]
    assert changed == [False, False, False, True, False]


@ODD_IN_FULL
def test_composed_slices_equal_the_cpus_and_change_no_other_bits(
    case: Case, layer: RecurrentMixer, run: Callable[..., torch.Tensor]
) -> None:
    x_LD, y_LD, outs, states = tokens(150), tokens(70, 2), [], []
    shapes = dict(case.shape.states)
    made = SegmentState(
        layer.identity() * 0.5 + 0.25,
        tokens(1, 3).new_ones(shapes["recurrent"]) * 0.1,
        torch.ones(shapes["conv"]) if "conv" in shapes else None,
    )
    slices = [
        Slice(0, 20, 0, 4, NONE, 0),
        Slice(20, 70, 0, 2, NONE, 0),
        Slice(90, 30, 50, 4, NONE, 0, composes=((0, 28),)),
        Slice(120, 100, 120, 4, NONE, 0, composes=((0, 88),)),
        Slice(220, 0, 300, 4, NONE, 0, composes=((0, 220),)),
    ]
    positions = [*range(20), *range(70), *range(50, 80), *range(120, 220)]
    for gpu in (False, True):
        state = replace(state_of(case), segments=(made,))
        clear(state, 2, 4)
        outs.append(run(torch.cat((x_LD[:20], y_LD, x_LD[20:])), step_of(slices, [], positions), state, gpu))
        states.append(state)
    alone = state_of(case)
    clear(alone, 2)
    wanted = run(y_LD, step_of([Slice(0, 70, 0, 2, NONE, 0)], [], list(range(70))), alone)
    assert torch.equal(outs[1][20:90], wanted)
    assert torch.equal(states[1].recurrent[2], alone.recurrent[2])
    assert (outs[0] - outs[1]).abs().max() < 1e-5 * outs[0].abs().max()
    of_cpu, of_gpu = (s.recurrent[4] for s in states)
    assert (of_cpu - of_gpu).abs().max() < 1e-5 * of_cpu.abs().max()
