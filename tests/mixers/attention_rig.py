"""Rigs of one attention layer over pages, which tests feed with prompts and decoded tokens."""

from typing import Any

import torch

from headwater.layers.architecture import Architecture, Block, Part
from headwater.layers.attention import GroupedAttention
from headwater.layers.layer import Layer
from headwater.memory.arena import Arena
from headwater.mixers.attention import Attention, AttentionStep
from headwater.mixers.batch import StepBatch
from headwater.mixers.slices import Slice
from headwater.mixers.weights import Weights
from headwater.spec import ModelSpec


def spec_of(layer: Layer, hidden: int, dtype: torch.dtype = torch.float32, page_size: int = 64) -> ModelSpec:
    """Return the spec of a model with only this layer."""
    block = Block("norm.weight", (Part(layer, "attention"),))
    architecture = Architecture("test", 64, hidden, (block,), 4096, 1e-6)
    return ModelSpec.of(architecture, str(dtype).removeprefix("torch."), page_size)


class AttentionRig:
    """Base of rigs, which set the layer, a poisoned arena, and the tokens [L, D] of a prompt."""

    layer: Any
    arena: Arena
    dtype: torch.dtype
    x: torch.Tensor
    steps: type[AttentionStep] = AttentionStep

    def run(self, slices: list[Slice], decodes: list[tuple[int, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        """Run the layer on rows [N, D]: slices of prompts, then tokens that are decoded, by position and table."""
        positions = [torch.arange(s.start, s.end) for s in slices] + [torch.tensor([p]) for p, _ in decodes]
        batch = StepBatch(
            token_N=torch.zeros(len(x), dtype=torch.int64),
            position_N=torch.cat(positions),
            slices=tuple(slices),
            decode_slot_B=torch.arange(len(decodes)),
            decode_tables=tuple(table for _, table in decodes),
            logits_row_R=torch.arange(0),
        )
        out: torch.Tensor = self.layer.forward(x, self.steps.of(batch, self.arena, self.dtype))
        return out

    def prefill(self, table: torch.Tensor, bounds: list[int], length: int | None = None) -> torch.Tensor:
        """Run the first `length` tokens of the prompt, all by default, cut at these bounds."""
        out = []
        for start, end in zip([0, *bounds], [*bounds, length or len(self.x)], strict=True):
            out.append(
                self.run([Slice(0, end - start, start, 0, table, start // self.arena.page_size)], [], self.x[start:end])
            )
        return torch.cat(out)


class GroupedRig(AttentionRig):
    """A layer of grouped attention with seeded weights, over pages that are NaN where nothing was written."""

    def __init__(
        self,
        shape: GroupedAttention,
        length: int,
        dtype: torch.dtype = torch.float32,
        page_size: int = 64,
        n_pages: int = 64,
    ) -> None:
        self.shape, self.dtype = shape, dtype
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            name: torch.randn(size, generator=generator).mul_(2 * size[-1] ** -0.5).to(dtype)
            for name, size in shape.tensors().items()
        }
        self.layer = Attention(0, shape, Weights(self.tensors, dtype))
        self.arena = Arena(spec_of(shape, shape.hidden, dtype, page_size), n_pages)
        self.arena.pages.fill_(0xFF)
        self.x = torch.randn(length, shape.hidden, generator=generator).to(dtype)

    def plain(self) -> torch.Tensor:
        """The layer's formulas in float64, all keys at once."""
        a, x, n = self.shape, self.x.double(), len(self.x)
        q, k, v = (self._product(name, x) for name in ("q_proj", "k_proj", "v_proj"))
        q, k, v = q.view(n, a.heads, -1), k.view(n, a.kv_heads, -1), v.view(n, a.kv_heads, -1)
        q, gate = q.split(a.head_dim, 2) if a.gated else (q, None)
        q, k = self._placed(q, "q_norm.weight"), self._placed(k, "k_norm.weight")
        k, v = (x.repeat_interleave(a.heads // a.kv_heads, dim=1) for x in (k, v))
        score = torch.einsum("qhd,khd->hqk", q, k) * (a.head_dim**-0.5 if a.scale is None else a.scale)
        score += torch.full((n, n), -torch.inf).triu(1)
        weight = score.exp()
        total = weight.sum(-1, keepdim=True)
        if a.sinks:
            total = total + self.tensors["sinks"].double()[:, None, None].exp()
        read = torch.einsum("hqk,khd->qhd", weight / total, v)
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
