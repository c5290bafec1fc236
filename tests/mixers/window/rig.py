"""One layer of sliding-window attention and its state memory, run step by step without a model."""

import torch

from headwater.layers.attention import Rotary, WindowAttention
from headwater.memory.slots import StateMemory
from headwater.mixers.batch import STATE, StepBatch
from headwater.mixers.slices import Slice
from headwater.mixers.weights import Weights
from headwater.mixers.window import Rings, SegmentWindow, WindowAttentionMixer
from headwater.state_layout import StateLayout

HIDDEN = 48
LENGTH = 700
ROWS = 24
ROTARY = Rotary(16)
NONE = torch.empty(0, dtype=torch.int64)


def shape_of(window: int, kv_heads: int = 2, rotary: Rotary | None = ROTARY, sinks: bool = False) -> WindowAttention:
    return WindowAttention(HIDDEN, 6, kv_heads, 16, normed=True, rotary=rotary, bias=True, sinks=sinks, window=window)


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
        self.segments: tuple[SegmentWindow, ...] = ()  # that slices compose with

    @property
    def rings(self) -> tuple[Rings, Rings]:
        """Keys and values of all rows."""
        return Rings(self.states.view(0, "keys")), Rings(self.states.view(0, "values"))

    def run(self, slices: list[Slice], decodes: list[tuple[int, int]], x: torch.Tensor) -> torch.Tensor:
        """`decodes` are (slot, position); adjacent ones of a slot are tokens of one sequence."""
        for s in slices:
            if s.start == 0:
                self.states.zero(s.slot)
        positions = [torch.arange(s.start, s.end) for s in slices]
        positions.append(torch.tensor([p for _, p in decodes], dtype=torch.int64))
        none = torch.zeros(1, dtype=torch.int64)
        batch = StepBatch(
            token_N=torch.zeros(len(x), dtype=torch.int64),
            position_N=torch.cat(positions),
            slices=tuple(slices),
            decode_slot_B=torch.tensor([slot for slot, _ in decodes], dtype=torch.int64),
            decode_tables=(none,) * len(decodes),
            logits_row_R=none,
            parents=tuple(i - 1 if i and slot == decodes[i - 1][0] else STATE for i, (slot, _) in enumerate(decodes)),
        )
        return self.layer.forward(x, batch, *self.rings, self.segments)

    def prefill(self, slot: int, cuts: tuple[int, ...] = (), length: int = LENGTH, saves=()) -> torch.Tensor:
        out = []
        for start, end in zip((0, *cuts), (*cuts, length), strict=True):
            inside = tuple((position, row) for position, row in saves if start < position <= end)
            s = Slice(0, end - start, start, slot, NONE, 0, inside)
            out.append(self.run([s], [], self.x[start:end]))
        return torch.cat(out)

    def make(self, x: torch.Tensor, head: int, tail: int) -> None:
        """Add a segment, computed by itself, that slices compose with: all of it but its head and its tail."""
        interior = range(head, len(x) - tail)
        self.states.zero(0)
        slices = [Slice(0, head, 0, 0, NONE, 0)] if head else []
        slices.append(Slice(head, len(interior), head, 0, NONE, 0))
        self.run(slices, [], x[: interior.stop])
        keys, values = (ring.memory_RWGD[0].clone() for ring in self.rings)
        self.segments += (SegmentWindow(keys, values, interior),)

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
