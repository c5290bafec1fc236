"""A Qwen3.5-style model to be trained: whole sequences, float32 weights under the names of its checkpoint.

It computes what the served model does (`headwater.models.hybrid`, which works in place, on pages and states), read from
the same spec.

B sequences, T tokens of each, C model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from headwater.layers.architecture import Architecture
from headwater.layers.attention import GroupedAttention, Rotary
from headwater.layers.feed_forward import Mlp
from headwater.layers.gdn import DeltaNet
from headwater.layers.layer import Layer
from training import convolution
from training.convolution import ShortConvolution
from training.delta_rule import Chunks, advance, prepare, read
from training.segments import Apart


class Weights(nn.Module):
    """The tensors of one layer under their own names."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype  # of products
        self.names = {name: name.replace(".", "/") for name in shapes}
        for name, shape in shapes.items():
            self.register_parameter(self.names[name], nn.Parameter(torch.empty(shape)))

    def __getitem__(self, name: str) -> torch.Tensor:
        return getattr(self, self.names[name])

    def product(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        """With the named weights, one below the other."""
        weight_NK = torch.cat([self[f"{name}.weight"].to(self.dtype) for name in names])
        return F.linear(x.to(self.dtype), weight_NK)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), weight.shape, weight, eps)


class Norm(NamedTuple):
    """Norm of a layer's input."""

    weight_C: torch.Tensor
    offset: float  # added to the weight
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight_C + self.offset, self.eps)


NAMES = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


class DeltaNetLayer(Weights):
    """The residual stream after projections, short convolution, gates, delta rule, gated norm."""

    def __init__(self, shape: DeltaNet, dtype: torch.dtype) -> None:
        super().__init__(shape.tensors(), dtype)
        self.shape = shape

    def forward(self, x_BTC: torch.Tensor, norm: Norm, apart: Apart | None = None) -> torch.Tensor:
        rows, z, b, a = self.project(x_BTC, norm)
        weight_nX = self["conv1d.weight"][:, 0].T.contiguous()
        mixed = ShortConvolution.apply(rows, weight_nX)
        forget_BT1 = alone_BT = None
        if apart is not None:
            forget_BT1, alone_BT = apart.forget_BT1, apart.alone_BT
            at = apart.first(len(weight_nX) - 1)
            mixed = mixed.index_put(at, ShortConvolution.apply(rows[at], weight_nX))
        chunks, z = self.before(mixed, z, b, a, forget_BT1)
        return self.after(x_BTC, (chunks.read_MntK, chunks.attend_Mntt), advance(chunks), z, alone_BT)

    def project(self, x_BTC: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, ...]:
        """Return the input of the convolution, and z, b and a, from which the gates are made."""
        s = self.shape
        return self.product(norm(x_BTC), *NAMES).split((s.channels, s.v_heads * s.v_dim, s.v_heads, s.v_heads), -1)

    def before(
        self,
        mixed: torch.Tensor,
        z: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        forget_BT1: torch.Tensor | None = None,
    ) -> tuple[Chunks, torch.Tensor]:
        """Return the inputs of the recurrence, and the gate of its output.

        With logarithms of decays that segments begin with, all sequences come a second time, with those.
        """
        s = self.shape
        q, k, v = mixed.split((s.k_heads * s.k_dim, s.k_heads * s.k_dim, s.v_heads * s.v_dim), -1)
        q, k = (x.unflatten(-1, (s.k_heads, s.k_dim)) for x in (q, k))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q, k = ((x * scale).repeat_interleave(s.v_heads // s.k_heads, -2) for x, scale in ((q, s.k_dim**-0.5), (k, 1)))
        g = -self["A_log"].exp() * F.softplus(a.float() + self["dt_bias"])
        taken = (q, k, v.unflatten(-1, (s.v_heads, s.v_dim)), g, b.float().sigmoid())
        if forget_BT1 is not None:
            again = (*taken[:3], g + forget_BT1, taken[4])
            taken = tuple(torch.cat(pair) for pair in zip(taken, again, strict=True))
        return prepare(*taken), z.float()

    def after(
        self,
        x_BTC: torch.Tensor,
        chunks_read: tuple[torch.Tensor, torch.Tensor],
        advanced: tuple[torch.Tensor, torch.Tensor],
        z: torch.Tensor,
        alone_BT: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The residual stream with rows from what was read of the states, of both if some tokens are by themselves."""
        s = self.shape
        if alone_BT is None:
            out = read(chunks_read, advanced, *z.shape[:2])
        else:
            together, apart = read(chunks_read, advanced, 2 * len(z), z.shape[1]).chunk(2)
            out = torch.where(alone_BT[..., None, None], apart, together)
        out = rms_norm(out, self["norm.weight"], s.norm_eps)
        gated = out * F.silu(z).unflatten(-1, (s.v_heads, s.v_dim))
        return x_BTC + self.product(gated.flatten(-2), "out_proj")


class AttentionLayer(Weights):
    """Gated full attention with rotated, normed heads."""

    def __init__(self, shape: GroupedAttention, dtype: torch.dtype) -> None:
        super().__init__(shape.tensors(), dtype)
        self.shape = shape

    def forward(self, x_BTC: torch.Tensor, norm: Norm, apart: Apart | None = None) -> torch.Tensor:
        return self.attend(x_BTC, norm, None if apart is None else apart.allowed_B1TT)

    def attend(self, x_BTC: torch.Tensor, norm: Norm, allowed_B1TT: torch.Tensor | None) -> torch.Tensor:
        """Without a mask to all tokens up to their own."""
        q, k, v, gate = self.project(norm(x_BTC))
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed_B1TT, is_causal=allowed_B1TT is None)
        return x_BTC + self.finish(read, gate)

    def project(self, normed_BTC: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values, [B, heads, T, D] each, and gates; the first token is at position `first`."""
        s = self.shape
        assert s.rotary is not None
        q, k, v = (self.product(normed_BTC, f"{name}_proj") for name in "qkv")
        q, gate = q.unflatten(-1, (s.heads, -1)).chunk(2, -1)
        q = rms_norm(q, self["q_norm.weight"] + s.norm_offset, s.norm_eps)
        k = rms_norm(k.unflatten(-1, (s.kv_heads, -1)), self["k_norm.weight"] + s.norm_offset, s.norm_eps)
        q, k = (rotate(x, s.rotary, first).transpose(1, 2).to(v.dtype) for x in (q, k))
        v = v.unflatten(-1, (s.kv_heads, -1)).transpose(1, 2)
        k, v = (x.repeat_interleave(s.heads // s.kv_heads, 1) for x in (k, v))
        return q, k, v, gate

    def finish(self, read: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the layer's rows from what its heads read."""
        return self.product((read.transpose(1, 2) * gate.sigmoid()).flatten(-2), "o_proj")


def rotate(x_BTHD: torch.Tensor, rotary: Rotary, first: int = 0) -> torch.Tensor:
    """The first channels of each head, by position, which begins with `first`; float32."""
    half = rotary.dim // 2
    position_T = torch.arange(first, first + x_BTHD.shape[1], device=x_BTHD.device, dtype=torch.float32)
    frequency_F = rotary.theta ** -(torch.arange(half, device=x_BTHD.device, dtype=torch.float32) / half)
    angle_T1F = (position_T[:, None] * frequency_F)[:, None]
    cos, sin = angle_T1F.cos(), angle_T1F.sin()
    a, b, rest = x_BTHD[..., :half], x_BTHD[..., half : 2 * half], x_BTHD[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


class MlpLayer(Weights):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, shape: Mlp, dtype: torch.dtype) -> None:
        super().__init__(shape.tensors(), dtype)

    def forward(self, x_BTC: torch.Tensor, norm: Norm, apart: Apart | None = None) -> torch.Tensor:
        return self.fed(x_BTC, norm)

    def fed(self, x_BTC: torch.Tensor, norm: Norm) -> torch.Tensor:
        normed_BTC = norm(x_BTC)
        hidden = F.silu(self.product(normed_BTC, "gate_proj")) * self.product(normed_BTC, "up_proj")
        return x_BTC + self.product(hidden, "down_proj")


LAYERS: dict[type[Layer], Any] = {
    DeltaNet: DeltaNetLayer,
    GroupedAttention: AttentionLayer,
    Mlp: MlpLayer,
}


ADDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")  # to the residual stream


def begin(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    """Decays forget over 10 to some thousand tokens (dt and A as in Mamba-2's code: Dao and Gu 2024).

    What adds to the residual stream begins half as large as the rest. From zero, recall is learned later.
    """
    if name == "A_log":
        weight.uniform_(0.5, 4.0, generator=generator).log_()
    elif name == "dt_bias":
        steps = weight.uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp_()
        weight.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus of it is the step
    elif name == "conv1d.weight":
        weight.uniform_(-0.5, 0.5, generator=generator)
    elif name == "norm.weight":
        weight.fill_(1.0)
    elif weight.dim() == 1:
        weight.zero_()
    else:
        scale = 0.5 if name in ADDS else 1.0
        weight.normal_(0.0, scale * weight.shape[-1] ** -0.5, generator=generator)


class TrainedHybrid(nn.Module):
    """Weights of a spec whose blocks have one part each."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.architecture, self.dtype = architecture, dtype
        width = architecture.hidden_size
        self.embed = nn.Parameter(torch.empty(architecture.vocab_size, width))
        self.head = None if architecture.tied else nn.Parameter(torch.empty(architecture.vocab_size, width))
        layers = [block.parts[0].layer for block in architecture.blocks]
        self.parts = nn.ModuleList(LAYERS[type(layer)](layer, dtype) for layer in layers)
        self.norms = nn.ParameterList(torch.zeros(width) for _ in architecture.blocks)
        self.final_norm = nn.Parameter(torch.zeros(width))

    @classmethod
    def random(cls, architecture: Architecture, seed: int, dtype: torch.dtype = torch.bfloat16) -> TrainedHybrid:
        """Weights to begin with."""
        model = cls(architecture, dtype)
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(model.embed, 0.0, 0.02, generator)
        if model.head is not None:
            nn.init.normal_(model.head, 0.0, 0.02, generator)
        for part in model.parts:
            assert isinstance(part, Weights)
            for name in part.names:
                begin(name, part[name].data, generator)
        return model

    def hidden(self, token_BT: torch.Tensor, apart: Apart | None = None) -> torch.Tensor:
        """Return the input of the head, float32 [B, T, C], for any token ids of the vocabulary."""
        a = self.architecture
        x_BTC = F.embedding(token_BT, self.embed)
        for norm_C, part in zip(self.norms, self.parts, strict=True):
            x_BTC = part(x_BTC, Norm(norm_C, a.norm_offset, a.norm_eps), apart)
        return Norm(self.final_norm, a.norm_offset, a.norm_eps)(x_BTC)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        weight_VC = self.embed if self.head is None else self.head
        return F.linear(hidden.to(self.dtype), weight_VC.to(self.dtype))


def compiled() -> None:
    """Have torch write fused code for the layers: half the time of a step, where there is a C++ compiler."""
    functions: tuple[tuple[Any, str], ...] = (
        (DeltaNetLayer, "project"),
        (DeltaNetLayer, "before"),
        (DeltaNetLayer, "after"),
        (AttentionLayer, "attend"),
        (MlpLayer, "fed"),
        (convolution, "activated"),
        (convolution, "before_activation"),
        (convolution, "of_weights"),
        (convolution, "summed"),
    )
    for owner, name in functions:
        setattr(owner, name, torch.compile(getattr(owner, name), dynamic=False))
