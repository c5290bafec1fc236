"""What every recurrent mixer promises, whatever its recurrence. A new mixer is one line in MIXERS.

L tokens of a sequence, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from headwater.mixers.batch import Slice, StepBatch
from headwater.mixers.gated_delta_net import GatedDeltaNet, LayerState
from headwater.mixers.gated_delta_net.reference import causal_convolution, delta_rule
from headwater.spec import DeltaNetShape

WIDTH, ROWS, LONGEST = 32, 40, 513
EPS = 1e-6
SHAPE = DeltaNetShape(k_heads=2, v_heads=4, k_dim=16, v_dim=24, conv_kernel=4)
Tensors = dict[str, torch.Tensor]


def qwen3_5_tensors(shape: DeltaNetShape = SHAPE, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    values = shape.v_heads * shape.v_dim
    sizes = {
        "in_proj_qkv.weight": (shape.channels, WIDTH),
        "in_proj_z.weight": (values, WIDTH),
        "in_proj_b.weight": (shape.v_heads, WIDTH),
        "in_proj_a.weight": (shape.v_heads, WIDTH),
        "out_proj.weight": (WIDTH, values),
        "conv1d.weight": (shape.channels, 1, shape.conv_kernel),
        "norm.weight": (shape.v_dim,),
        "A_log": (shape.v_heads,),
        "dt_bias": (shape.v_heads,),
    }
    return {name: torch.randn(size, generator=generator) * 0.3 for name, size in sizes.items()}


def qwen3_next_tensors() -> Tensors:
    """The same layer with its projections interleaved by key head."""
    tensors, heads = qwen3_5_tensors(), SHAPE.k_heads
    keys = heads * SHAPE.k_dim
    q, k, v = tensors.pop("in_proj_qkv.weight").split((keys, keys, SHAPE.v_heads * SHAPE.v_dim))
    z, b, a = (tensors.pop(f"in_proj_{name}.weight") for name in "zba")
    tensors["in_proj_qkvz.weight"] = torch.cat([w.unflatten(0, (heads, -1)) for w in (q, k, v, z)], 1).flatten(0, 1)
    tensors["in_proj_ba.weight"] = torch.cat([w.unflatten(0, (heads, -1)) for w in (b, a)], 1).flatten(0, 1)
    return tensors


def gated_delta_net_reference(tensors: Tensors, x_LD: torch.Tensor) -> torch.Tensor:
    """The layer in float64, token by token, from Qwen3.5's weights."""
    s, w = SHAPE, {name: tensor.double() for name, tensor in tensors.items()}
    x_LD = x_LD.double()
    keys = s.k_heads * s.k_dim
    no_tail_CW = x_LD.new_zeros(s.channels, s.conv_kernel - 1)
    mixed_LC = causal_convolution(x_LD @ w["in_proj_qkv.weight"].T, w["conv1d.weight"].squeeze(1).T, no_tail_CW)
    q_LX, k_LX, v_LX = torch.nn.functional.silu(mixed_LC).split((keys, keys, s.v_heads * s.v_dim), -1)
    q_LGK, k_LGK = (t.unflatten(-1, (s.k_heads, s.k_dim)) for t in (q_LX, k_LX))
    q_LHK, k_LHK = (
        (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(s.v_heads // s.k_heads, 1)
        for t in (q_LGK, k_LGK)
    )
    g_LH = -w["A_log"].exp() * torch.nn.functional.softplus(x_LD @ w["in_proj_a.weight"].T + w["dt_bias"])
    beta_LH = torch.sigmoid(x_LD @ w["in_proj_b.weight"].T)
    state_HKV = x_LD.new_zeros(s.v_heads, s.k_dim, s.v_dim)
    v_LHV = v_LX.unflatten(-1, (s.v_heads, s.v_dim))
    core_LHV, _ = delta_rule(q_LHK * s.k_dim**-0.5, k_LHK, v_LHV, g_LH, beta_LH, state_HKV)
    normed_LHV = core_LHV / (core_LHV.square().mean(-1, keepdim=True) + EPS).sqrt() * w["norm.weight"]
    gate_LX = torch.nn.functional.silu(x_LD @ w["in_proj_z.weight"].T)
    return (normed_LHV.flatten(1) * gate_LX) @ w["out_proj.weight"].T


@dataclass(frozen=True)
class Mixer:
    """One line of the table: how to build the layer, and its outputs in float64."""

    tensors: Callable[[], Tensors]
    reference: Callable[[torch.Tensor], torch.Tensor]

    def build(self) -> GatedDeltaNet:
        return GatedDeltaNet(SHAPE, EPS, self.tensors())

    def state(self) -> LayerState:
        """Rows full of NaN: what is read without having been written shows."""
        nan = float("nan")
        return LayerState(
            recurrent=torch.full((ROWS, SHAPE.v_heads, SHAPE.k_dim, SHAPE.v_dim), nan),
            conv=torch.full((ROWS, SHAPE.channels, SHAPE.conv_kernel - 1), nan),
        )


def _delta_net_reference(x_LD: torch.Tensor) -> torch.Tensor:
    return gated_delta_net_reference(qwen3_5_tensors(), x_LD)


MIXERS = {
    "gated_delta_net/qwen3_5": Mixer(qwen3_5_tensors, _delta_net_reference),
    "gated_delta_net/qwen3_next": Mixer(qwen3_next_tensors, _delta_net_reference),
}


@pytest.fixture(params=MIXERS)
def mixer(request: pytest.FixtureRequest) -> Mixer:
    return MIXERS[request.param]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Whatever torch allocates without filling it holds NaN."""
    torch.use_deterministic_algorithms(True)
    with torch.inference_mode():
        yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + len(x)) of a sequence."""

    x_LD: torch.Tensor
    slot: int
    start: int = 0
    saves: tuple[tuple[int, int], ...] = ()


def step(
    layer: GatedDeltaNet,
    state: LayerState,
    pieces: list[Piece],
    decode_x_BD: torch.Tensor | None = None,
    decode_slots: tuple[int, ...] = (),
) -> list[torch.Tensor]:
    """Run one ragged step; outputs of each piece, then of all decoding sequences."""
    slices, first = [], 0
    for p in pieces:
        if p.start == 0:
            state.recurrent[p.slot] = 0
            state.conv[p.slot] = 0
        slices.append(Slice(first, len(p.x_LD), p.start, p.slot, torch.empty(0, dtype=torch.int64), 0, p.saves))
        first += len(p.x_LD)
    rows = [p.x_LD for p in pieces] + ([decode_x_BD] if decode_x_BD is not None else [])
    none = torch.empty(0, dtype=torch.int64)
    batch = StepBatch(none, none, tuple(slices), torch.tensor(decode_slots), tuple(none for _ in decode_slots), none)
    out_ND = layer.forward(torch.cat(rows), batch, state)
    return list(out_ND.split([len(r) for r in rows]))


def tokens(n: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).abs().max() / wanted.abs().max())


def same_state(state: LayerState, row: int, other: LayerState, other_row: int) -> bool:
    recurrent = torch.equal(state.recurrent[row], other.recurrent[other_row])
    return recurrent and torch.equal(state.conv[row], other.conv[other_row])


def test_fast_equals_the_reference_at_every_length_in_ragged_batches(mixer: Mixer) -> None:
    layer, x_LD = mixer.build(), tokens(LONGEST)
    wanted_LD = mixer.reference(x_LD)
    for first in range(1, LONGEST + 1, 19):
        lengths = range(first, min(first + 19, LONGEST + 1))
        outs = step(layer, mixer.state(), [Piece(x_LD[:n], slot) for slot, n in enumerate(lengths)])
        for n, out_LD in zip(lengths, outs, strict=True):
            assert relative_error(out_LD, wanted_LD[:n]) < 1e-5, n


@pytest.mark.parametrize("cuts", [(64,), (128,), (448,), (512,), (64, 128), (192, 256, 448), tuple(range(64, 513, 64))])
def test_a_cut_at_a_page_boundary_changes_no_bit(mixer: Mixer, cuts: tuple[int, ...]) -> None:
    layer, x_LD, whole, parts = mixer.build(), tokens(LONGEST), mixer.state(), mixer.state()
    (wanted_LD,) = step(layer, whole, [Piece(x_LD, 3)])
    ends = (*cuts, LONGEST)
    outs = [step(layer, parts, [Piece(x_LD[a:b], 5, a)])[0] for a, b in zip((0, *cuts), ends, strict=True)]
    assert torch.equal(torch.cat(outs), wanted_LD)
    assert same_state(parts, 5, whole, 3)


def test_states_kept_on_the_way_are_those_of_a_run_that_ended_there(mixer: Mixer) -> None:
    layer, x_LD, state = mixer.build(), tokens(LONGEST), mixer.state()
    saves = tuple((end, 10 + i) for i, end in enumerate(range(64, LONGEST, 64)))
    step(layer, state, [Piece(tokens(200, 2), 1), Piece(x_LD, 0, saves=saves), Piece(tokens(300, 3), 2)])
    for end, row in saves:
        ended = mixer.state()
        step(layer, ended, [Piece(x_LD[:end], 0)])
        assert same_state(state, row, ended, 0), end
    unused = state.recurrent[10 + len(saves) :]
    assert unused.isnan().all()


def test_decoding_agrees_with_the_reference(mixer: Mixer) -> None:
    layer, x_LD, state = mixer.build(), tokens(90), mixer.state()
    wanted_LD = mixer.reference(x_LD)
    step(layer, state, [Piece(x_LD[:70], 7)])
    outs = [step(layer, state, [], x_LD[t : t + 1], (7,))[0] for t in range(70, 90)]
    assert relative_error(torch.cat(outs), wanted_LD[70:]) < 1e-5


def test_a_decoded_token_is_close_to_a_prefilled_one(mixer: Mixer) -> None:
    layer, x_LD, state = mixer.build(), tokens(129), mixer.state()
    step(layer, state, [Piece(x_LD[:128], 0), Piece(x_LD[:128], 1)])
    (prefilled_LD,) = step(layer, state, [Piece(x_LD[128:], 0, 128)])
    (decoded_BD,) = step(layer, state, [], x_LD[128:], (1,))
    assert relative_error(decoded_BD, prefilled_LD.double()) < 1e-5
    assert torch.equal(state.conv[0], state.conv[1])


def test_other_sequences_in_the_step_change_no_bit(mixer: Mixer) -> None:
    layer, x_LD, x_BD = mixer.build(), tokens(150), tokens(1, 5)
    alone = mixer.state()
    step(layer, alone, [Piece(tokens(100, 4), 1)])
    (wanted_LD,) = step(layer, alone, [Piece(x_LD, 0)])
    (decoded_BD,) = step(layer, alone, [], x_BD, (1,))
    for others in ((64,), (700, 1, 65), (5,) * 12):
        among = mixer.state()
        neighbours = [Piece(tokens(n, 10 + i), 20 + i) for i, n in enumerate(others)]
        step(layer, among, [Piece(tokens(100, 4), 1), *neighbours])
        slots = (*range(20, 20 + len(others)), 1)
        x_all_BD = torch.cat((tokens(len(others), 6), x_BD))
        outs = step(layer, among, [*neighbours, Piece(x_LD, 0)], x_all_BD, slots)
        assert torch.equal(outs[-2], wanted_LD)
        assert torch.equal(outs[-1][-1:], decoded_BD)
        assert same_state(among, 0, alone, 0)
        assert same_state(among, 1, alone, 1)


def test_decoding_in_adjacent_and_in_scattered_slots_gives_the_same_bits(mixer: Mixer) -> None:
    layer, x_BD = mixer.build(), tokens(5, 7)
    adjacent, scattered = mixer.state(), mixer.state()
    for state, slots in ((adjacent, (2, 3, 4, 5, 6)), (scattered, (9, 1, 30, 4, 17))):
        step(layer, state, [Piece(tokens(30, slot), row) for slot, row in enumerate(slots)])
    (wanted_BD,) = step(layer, adjacent, [], x_BD, (2, 3, 4, 5, 6))
    (got_BD,) = step(layer, scattered, [], x_BD, (9, 1, 30, 4, 17))
    assert torch.equal(got_BD, wanted_BD)
    for row, other in zip((9, 1, 30, 4, 17), (2, 3, 4, 5, 6), strict=True):
        assert same_state(scattered, row, adjacent, other)
