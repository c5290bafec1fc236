"""Puts a model together from a checkpoint's tensors.

Shapes: C model width, I intermediate width, E experts, V vocabulary; the rest as in spec.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headwater.mixers.attention.layer import Attention, AttentionWeights
from headwater.mixers.gated_delta_net import GatedDeltaNet, LayerState
from headwater.mixers.linear import Embedding, Linear
from headwater.mixers.mlp import GatedMlp
from headwater.mixers.moe import MixtureOfExperts
from headwater.mixers.norm import RMSNorm
from headwater.models.families import Family, delta_net_shapes
from headwater.models.hybrid import Block, FeedForward, HybridModel, Step
from headwater.models.tensors import CheckpointTensors
from headwater.spec import ModelSpec

Mixer = Callable[[torch.Tensor, Step], torch.Tensor]
PREFIXES = ("model.", "model.language_model.", "language_model.model.")  # of a text model, and within a multimodal one


@dataclass(frozen=True)
class Source:
    """Tensors below one name, with the shapes that the spec gives them."""

    spec: ModelSpec
    tensors: CheckpointTensors
    prefix: str

    def at(self, name: str) -> Source:
        return Source(self.spec, self.tensors, f"{self.prefix}{name}.")

    def get(self, name: str, *shape: int) -> torch.Tensor:
        return self.tensors.get(self.prefix + name, *shape)

    def stored(self, name: str, *shape: int) -> torch.Tensor:
        """In the file's dtype."""
        return self.tensors.raw(self.prefix + name, *shape).to(self.tensors.device)

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def linear(self, *parts: tuple[str, int], width: int | None = None) -> Linear:
        """One product that yields the named ones side by side; each is (name, outputs)."""
        n_in = width or self.spec.hidden_size
        weights = [self.get(f"{name}.weight", n_out, n_in) for name, n_out in parts]
        return Linear(weights[0] if len(weights) == 1 else torch.cat(weights))

    def norm(self, name: str, width: int) -> RMSNorm:
        return RMSNorm(self.stored(f"{name}.weight", width), self.spec.norm_eps)


def build_model(spec: ModelSpec, tensors: CheckpointTensors, family: Family) -> HybridModel:
    """Pack the weights one layer after the other. Raises CheckpointError for a missing or misshapen tensor."""
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in tensors), PREFIXES[0])
    root = Source(spec, tensors, prefix)
    layers = [_block(root.at(f"layers.{i}"), i, family) for i in range(len(spec.mixers))]
    table_VC = root.stored("embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    embed = Embedding(table_VC.to(tensors.dtype, copy=True))  # a copy, so that nothing keeps the file mapped
    top = Source(spec, tensors, "")
    head = embed.head() if spec.tied else top.linear(("lm_head", spec.vocab_size))
    return HybridModel(spec, layers, embed, root.norm("norm", spec.hidden_size), head)


def _block(source: Source, layer: int, family: Family) -> Block:
    spec = source.spec
    return Block(
        mixer_norm=source.norm("input_layernorm", spec.hidden_size),
        mixer=_MIXERS[spec.mixers[layer]](source, layer, family),
        ffn_norm=source.norm("post_attention_layernorm", spec.hidden_size),
        ffn=_FFNS[spec.ffns[layer]](source.at("mlp")),
    )


def _attention(block: Source, layer: int, family: Family) -> Mixer:
    source, shape = block.at("self_attn"), block.spec.attention
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = AttentionWeights(
        qkv=source.linear(("q_proj", 2 * queries), ("k_proj", keys), ("v_proj", keys)),
        q_norm=source.norm("q_norm", shape.head_dim),
        k_norm=source.norm("k_norm", shape.head_dim),
        out=source.linear(("o_proj", source.spec.hidden_size), width=queries),
    )
    attention = Attention(layer, shape, weights)

    def mix(x_NC: torch.Tensor, step: Step) -> torch.Tensor:
        assert step.attention is not None
        return attention.forward(x_NC, step.attention)

    return mix


def _delta_net(block: Source, layer: int, family: Family) -> Mixer:
    source, spec = block.at("linear_attn"), block.spec
    shapes = delta_net_shapes(spec, family)
    # Decays and norms are computed in float32: they come as they are stored, as copies, so that nothing keeps the file
    # mapped. What goes into products is cast, and copied when it is packed.
    products = {name: source.get(name, *shape) for name, shape in shapes.items() if "_proj" in name}
    others = {name: source.stored(name, *shape).clone() for name, shape in shapes.items() if name not in products}
    tensors = products | others
    mixer = GatedDeltaNet(spec.delta_net, spec.norm_eps, tensors)

    def mix(x_NC: torch.Tensor, step: Step) -> torch.Tensor:
        state = LayerState(step.states.view(layer, "recurrent"), step.states.view(layer, "conv"))
        return mixer.forward(x_NC, step.batch, state)

    return mix


def _dense(source: Source) -> GatedMlp:
    return _mlp(source, source.spec.intermediate_size)


def _mlp(source: Source, width: int) -> GatedMlp:
    return GatedMlp(
        gate=source.linear(("gate_proj", width)),
        up=source.linear(("up_proj", width)),
        down=source.linear(("down_proj", source.spec.hidden_size), width=width),
    )


def _experts(source: Source) -> MixtureOfExperts:
    shape = source.spec.moe
    assert shape is not None
    return MixtureOfExperts(
        shape=shape,
        router=source.linear(("gate", shape.experts)),
        experts=_fused_experts(source.at("experts")) if "experts.gate_up_proj" in source else _single_experts(source),
        shared=_mlp(source.at("shared_expert"), shape.shared_intermediate),
        shared_gate=source.linear(("shared_expert_gate", 1)),
    )


def _fused_experts(source: Source) -> tuple[GatedMlp, ...]:
    """All experts in two tensors."""
    shape, hidden = source.spec.moe, source.spec.hidden_size
    assert shape is not None
    gate_up_EIC = source.stored("gate_up_proj", shape.experts, 2 * shape.intermediate, hidden)
    down_ECI = source.stored("down_proj", shape.experts, hidden, shape.intermediate)
    cast = source.tensors.cast
    return tuple(
        GatedMlp(*(Linear(cast(weight)) for weight in (*gate_up.chunk(2), down)))
        for gate_up, down in zip(gate_up_EIC, down_ECI, strict=True)
    )


def _single_experts(source: Source) -> tuple[GatedMlp, ...]:
    """Three tensors an expert."""
    shape = source.spec.moe
    assert shape is not None
    return tuple(_mlp(source.at(f"experts.{e}"), shape.intermediate) for e in range(shape.experts))


_MIXERS = {"attention": _attention, "gated_delta_net": _delta_net}
_FFNS: dict[str, Callable[[Source], FeedForward]] = {"mlp": _dense, "moe": _experts}
