"""Variants of attention in the model families, compared with the formulas in float64: prefill and decode."""

from __future__ import annotations

import pytest
import torch

from headwater.layers.attention import GroupedAttention, Rotary
from headwater.memory.arena import Arena
from headwater.mixers.attention import Attention, AttentionStep
from headwater.mixers.batch import StepBatch
from headwater.mixers.slices import Slice
from headwater.mixers.weights import Weights
from headwater.spec import Architecture, Block, ModelSpec, Part

HIDDEN = 48
LENGTH = 150
DECODED = 6
SHAPES = {
    "no positions": GroupedAttention(HIDDEN, 4, 2, 16),
    "biases": GroupedAttention(HIDDEN, 4, 2, 16, bias=True, out_bias=True, rotary=Rotary(16)),
    "scale": GroupedAttention(HIDDEN, 6, 3, 16, scale=0.7, rotary=Rotary(16, theta=500.0)),
    "norms": GroupedAttention(HIDDEN, 4, 2, 16, normed=True, norm_eps=1e-5, norm_offset=1.0, rotary=Rotary(16)),
    "neighbours": GroupedAttention(HIDDEN, 4, 1, 24, rotary=Rotary(16, neighbours=True)),
    "some channels": GroupedAttention(HIDDEN, 4, 4, 24, rotary=Rotary(10)),
    "gate": GroupedAttention(HIDDEN, 4, 2, 16, gated=True, bias=True, rotary=Rotary(8)),
    "one head": GroupedAttention(HIDDEN, 1, 1, 16, rotary=Rotary(16)),
    "odd heads on one": GroupedAttention(HIDDEN, 5, 1, 16, rotary=Rotary(16)),
}


class Rig:
    """One layer, with seeded weights, and pages that are NaN where nothing was written."""

    def __init__(self, shape: GroupedAttention, page_size: int = 64) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            name: torch.randn(size, generator=generator) * 2 * size[-1] ** -0.5
            for name, size in shape.tensors().items()
        }
        self.layer = Attention(0, shape, Weights(self.tensors))
        block = Block("norm.weight", (Part(shape, "attention"),))
        spec = ModelSpec.of(Architecture("any", 64, HIDDEN, (block,), 1024, 1e-6), "float32", page_size)
        self.arena = Arena(spec, 16)
        self.arena.pages.fill_(0xFF)
        self.x = torch.randn(LENGTH + DECODED, HIDDEN, generator=generator)

    def run(self, slices: list[Slice], decodes: list[tuple[int, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        none = torch.empty(0, dtype=torch.int64)
        positions = [torch.arange(s.start, s.end) for s in slices] + [torch.tensor([p]) for p, _ in decodes]
        tables = tuple(table[: p // self.arena.page_size + 1] for p, table in decodes)
        batch = StepBatch(none, torch.cat(positions), tuple(slices), none, tables, none)
        return self.layer.forward(x, AttentionStep.of(batch, self.arena, torch.float32))

    def whole(self, table: torch.Tensor) -> torch.Tensor:
        """A prefill, and then decoding."""
        n_pages = -(-LENGTH // self.arena.page_size)
        parts = [self.run([Slice(0, LENGTH, 0, 0, table[:n_pages], 0)], [], self.x[:LENGTH])]
        for p in range(LENGTH, LENGTH + DECODED):
            parts.append(self.run([], [(p, table)], self.x[p : p + 1]))
        return torch.cat(parts)

    def plain(self) -> torch.Tensor:
        a, x, n = self.shape, self.x.double(), len(self.x)
        q, k, v = (self._product(name, x) for name in ("q_proj", "k_proj", "v_proj"))
        q, k, v = q.view(n, a.heads, -1), k.view(n, a.kv_heads, -1), v.view(n, a.kv_heads, -1)
        q, gate = q.split(a.head_dim, 2) if a.gated else (q, None)
        q, k = self._placed(q, "q_norm.weight"), self._placed(k, "k_norm.weight")
        k, v = (x.repeat_interleave(a.heads // a.kv_heads, dim=1) for x in (k, v))
        score = torch.einsum("qhd,khd->hqk", q, k) * (a.head_dim**-0.5 if a.scale is None else a.scale)
        score += torch.full((n, n), -torch.inf).triu(1)
        read = torch.einsum("hqk,khd->qhd", score.softmax(-1), v)
        return self._product("o_proj", (read if gate is None else read * gate.sigmoid()).flatten(1))

    def _product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.tensors[f"{name}.weight"].double().T
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else y + bias.double()

    def _placed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        a = self.shape
        if a.normed:
            scale = a.norm_offset + self.tensors[name].double()
            x = x * (x.square().mean(-1, keepdim=True) + a.norm_eps).rsqrt() * scale
        if a.rotary is None:
            return x
        half = a.rotary.dim // 2
        frequency = a.rotary.theta ** (-torch.arange(half).double() / half)
        turn = torch.polar(torch.ones(()).double(), torch.arange(len(x)).double()[:, None, None] * frequency)
        pairs, rest = x[..., : 2 * half], x[..., 2 * half :]
        if a.rotary.neighbours:
            turned = torch.view_as_real(torch.view_as_complex(pairs.unflatten(-1, (half, 2)).contiguous()) * turn)
            return torch.cat([turned.flatten(-2), rest], -1)
        turned = torch.complex(pairs[..., :half], pairs[..., half:]) * turn
        return torch.cat([turned.real, turned.imag, rest], -1)


@pytest.mark.parametrize("name", SHAPES)
def test_agrees_with_the_formulas(name: str) -> None:
    rig = Rig(SHAPES[name])
    assert (rig.whole(torch.tensor([5, 2, 11])).double() - rig.plain()).abs().max() < 1e-4


def test_pages_of_any_size_give_the_same_bits() -> None:
    wanted = Rig(SHAPES["norms"]).whole(torch.tensor([5, 2, 11]))
    for page_size in (128, 192):
        assert torch.equal(Rig(SHAPES["norms"], page_size).whole(torch.tensor([7, 3])), wanted), page_size


@pytest.mark.parametrize("name", ["one head", "odd heads on one", "neighbours", "some channels"])
def test_decode_of_each_shape_is_equal_among_others(name: str) -> None:
    """Include layers of one KV head: a single product of theirs would be spread over threads."""
    rig = Rig(SHAPES[name])
    tables = [torch.tensor([i, 8 + i]) for i in range(5)]
    decodes = [(length, table) for length, table in zip((1, 60, 64, 90, 127), tables, strict=True)]
    for length, table in decodes:
        rig.run([Slice(0, length, 0, 0, table[: -(-length // 64)], 0)], [], rig.x[:length])
    alone = [rig.run([], [decode], rig.x[-1:]) for decode in decodes]
    together = rig.run([], decodes, rig.x[-1:].expand(5, -1))
    assert torch.equal(together, torch.cat(alone))
