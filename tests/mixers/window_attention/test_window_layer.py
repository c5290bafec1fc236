"""Sliding-window attention against a plain one, and against itself in other cuts, slots and company."""

from __future__ import annotations

import pytest
import torch

from headwater.layers.rotary import Rotary
from headwater.layers.window_attention import WindowAttention
from headwater.memory.slots import StateMemory
from headwater.mixers.batch import Slice, StepBatch
from headwater.mixers.weights import Weights
from headwater.mixers.window_attention import WindowAttentionMixer
from headwater.mixers.window_attention.rings import Rings
from headwater.spec import StateLayout

HIDDEN = 48
LENGTH = 700
WINDOWS = (1, 20, 65, 100, 600, 1000)
ROWS = 24


def shape_of(window: int, heads: int = 6, kv_heads: int = 2) -> WindowAttention:
    return WindowAttention(HIDDEN, heads, kv_heads, 16, normed=True, rotary=Rotary(16), bias=True, window=window)


class Rig:
    """One layer with seeded weights, and state memory that is NaN where no sequence has begun."""

    def __init__(self, shape: WindowAttention, dtype: torch.dtype = torch.float32) -> None:
        self.shape, self.dtype = shape, dtype
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            name: torch.randn(size, generator=generator).mul_(2 * size[-1] ** -0.5).to(dtype)
            for name, size in shape.tensors().items()
        }
        self.layer = WindowAttentionMixer(shape, Weights(self.tensors, dtype))
        name = str(dtype).removeprefix("torch.")
        layout = StateLayout.of([(0, part, size, name) for part, size in shape.states])
        self.states = StateMemory(layout, ROWS, layout.bytes)
        self.states.bytes_RB.fill_(0xFF)
        self.x = torch.randn(LENGTH + 20, HIDDEN, generator=generator).to(dtype)

    def run(self, slices: list[Slice], decodes: list[tuple[int, int]], x: torch.Tensor, idle: int = 0) -> torch.Tensor:
        """`decodes` are (slot, position)."""
        for s in slices:
            if s.start == 0:
                self.states.zero(s.slot)
        positions = [torch.arange(s.start, s.end) for s in slices]
        positions.append(torch.tensor([p for _, p in decodes] + [0] * idle, dtype=torch.int64))
        none = torch.zeros(1, dtype=torch.int64)
        batch = StepBatch(
            token_N=torch.zeros(len(x), dtype=torch.int64),
            position_N=torch.cat(positions),
            slices=tuple(slices),
            decode_slot_B=torch.tensor([slot for slot, _ in decodes], dtype=torch.int64),
            decode_tables=(none,) * len(decodes),
            logits_row_R=none,
        )
        return self.layer.forward(x, batch, *(Rings(self.states.view(0, name)) for name in ("keys", "values")))

    def prefill(self, slot: int, cuts: tuple[int, ...] = (), length: int = LENGTH, saves=()) -> torch.Tensor:
        out = []
        for start, end in zip((0, *cuts), (*cuts, length), strict=True):
            inside = tuple((position, row) for position, row in saves if start < position <= end)
            s = Slice(0, end - start, start, slot, torch.empty(0, dtype=torch.int64), 0, inside)
            out.append(self.run([s], [], self.x[start:end]))
        return torch.cat(out)

    def plain(self) -> torch.Tensor:
        """The layer's formulas in float64, all keys at once."""
        a, t, n = self.shape, {name: weight.double() for name, weight in self.tensors.items()}, LENGTH
        x = self.x[:n].double()
        q, k, v = (x @ t[f"{name}_proj.weight"].T + t[f"{name}_proj.bias"] for name in "qkv")
        q, k, v = q.view(n, a.heads, -1), k.view(n, a.kv_heads, -1), v.view(n, a.kv_heads, -1)
        q, k = self._placed(q, t["q_norm.weight"]), self._placed(k, t["k_norm.weight"])
        k, v = (x.repeat_interleave(a.heads // a.kv_heads, dim=1) for x in (k, v))
        distance = torch.arange(n)[:, None] - torch.arange(n)
        score = torch.einsum("qhd,khd->hqk", q, k) * a.head_dim**-0.5
        score = score.masked_fill((distance < 0) | (distance >= a.window), -torch.inf)
        return torch.einsum("hqk,khd->qhd", score.softmax(-1), v).flatten(1) @ t["o_proj.weight"].T

    def _placed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x * (x.square().mean(-1, keepdim=True) + self.shape.norm_eps).rsqrt() * weight
        half = x.shape[-1] // 2
        angle = torch.arange(len(x))[:, None].double() / 10_000.0 ** (torch.arange(half).double() / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@pytest.mark.parametrize("window", WINDOWS)
def test_agrees_with_the_formulas(window: int) -> None:
    rig = Rig(shape_of(window))
    assert (rig.prefill(3).double() - rig.plain()).abs().max() < 1e-4


@pytest.mark.parametrize("window", WINDOWS)
def test_decode_agrees_with_the_formulas(window: int) -> None:
    rig = Rig(shape_of(window))
    wanted = rig.plain()
    for begun in (1, 90, 640):
        rig.prefill(3, length=begun)
        decoded = [rig.run([], [(3, p)], rig.x[p : p + 1]) for p in range(begun, begun + 20)]
        assert (torch.cat(decoded).double() - wanted[begun : begun + 20]).abs().max() < 1e-4, begun


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", WINDOWS)
def test_cuts_change_no_bit(window: int, dtype: torch.dtype) -> None:
    rig = Rig(shape_of(window), dtype)
    whole = rig.prefill(3)
    assert not whole.isnan().any(), "read what was never written"
    for cuts in [(64,), (512,), (448, 576), tuple(range(64, LENGTH, 64))]:
        assert torch.equal(rig.prefill(5, cuts), whole), cuts
        assert torch.equal(rig.states.bytes_RB[5], rig.states.bytes_RB[3]), cuts


@pytest.mark.parametrize("window", WINDOWS)
def test_the_end_of_a_slice_changes_no_bit(window: int) -> None:
    rig = Rig(shape_of(window))
    whole = rig.prefill(3)
    for length in (1, 2, 5, 63, 65, 200, 511, 513):
        assert torch.equal(rig.prefill(5, length=length), whole[:length]), length


@pytest.mark.parametrize("window", WINDOWS)
def test_states_saved_on_the_way_are_those_of_a_run_that_ended_there(window: int) -> None:
    rig = Rig(shape_of(window))
    saves = tuple((position, 6 + i) for i, position in enumerate(range(64, LENGTH, 64)))
    rig.prefill(3, (128, 448), saves=saves)
    for position, row in saves:
        rig.prefill(4, length=position)
        assert torch.equal(rig.states.bytes_RB[row], rig.states.bytes_RB[4]), position


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "kv_heads"), [(1, 2), (100, 1), (100, 6), (600, 2)])
def test_company_and_slots_change_no_bit(window: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Sequences of all lengths decode alone, then among each other and a prefill, in slots side by side and not."""
    lengths = (1, 2, 64, 99, 100, 101, 300, 599, 700)
    alone = Rig(shape_of(window, kv_heads=kv_heads), dtype)
    whole, wanted = alone.prefill(0), []
    for length in lengths:
        alone.prefill(1, length=length)
        wanted.append(alone.run([], [(1, length)], alone.x[length : length + 1]))
    for slots in (range(2, 11), (9, 3, 17, 4, 20, 11, 5, 7, 13)):
        rig = Rig(shape_of(window, kv_heads=kv_heads), dtype)
        for slot, length in zip(slots, lengths, strict=True):
            rig.prefill(slot, length=length)
        rows = torch.cat([rig.x[:LENGTH], *(rig.x[n : n + 1] for n in lengths), rig.x[:3]])
        one = Slice(0, LENGTH, 0, 22, torch.empty(0, dtype=torch.int64), 0)
        out = rig.run([one], list(zip(slots, lengths, strict=True)), rows, idle=3)
        assert torch.equal(out[:LENGTH], whole)
        assert torch.equal(out[LENGTH:-3], torch.cat(wanted))
        assert not out.isnan().any()
