"""Puts a model together from a checkpoint's tensors.

Which class computes which kind of layer stands in the table below; where its tensors are, in the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.gdn import DeltaNet
from headwater.layers.gla import GatedLinearAttention
from headwater.layers.kda import DeltaAttention
from headwater.layers.layer import Layer
from headwater.layers.lightning import Lightning
from headwater.layers.mamba import Mamba
from headwater.layers.mamba2 import Mamba2
from headwater.layers.mla import LatentAttention
from headwater.layers.window import WindowAttention
from headwater.memory.segments import Segment
from headwater.mixers.attention.layer import Attention
from headwater.mixers.composing import SegmentState
from headwater.mixers.gdn import GatedDeltaNet
from headwater.mixers.gla import GatedLinearAttentionMixer
from headwater.mixers.kda import KimiDeltaAttention
from headwater.mixers.lightning import LightningAttention
from headwater.mixers.linear import Embedding
from headwater.mixers.mamba import SelectiveStateSpace
from headwater.mixers.mamba2 import StateSpaceDual
from headwater.mixers.mla import LatentAttentionMixer
from headwater.mixers.mlp import mlp_of
from headwater.mixers.moe import MixtureOfExperts
from headwater.mixers.norm import RMSNorm
from headwater.mixers.recurrent import LayerState, RecurrentMixer
from headwater.mixers.weights import Weights
from headwater.mixers.window import WindowAttentionMixer
from headwater.mixers.window.composing import SegmentWindow
from headwater.mixers.window.rings import Rings
from headwater.models.hybrid import Function, HybridModel, Mixers, Residual, Step
from headwater.models.tensors import CheckpointTensors, PartTensors
from headwater.spec import ModelSpec, Part

RECURRENT: dict[type[Layer], Callable[[Any, Weights], RecurrentMixer[Any]]] = {
    DeltaAttention: KimiDeltaAttention,
    DeltaNet: GatedDeltaNet,
    GatedLinearAttention: GatedLinearAttentionMixer,
    Lightning: LightningAttention,
    Mamba2: StateSpaceDual,
    Mamba: SelectiveStateSpace,
}
ATTENTION: dict[type[Layer], Callable[[int, Any, Weights], Attention | LatentAttentionMixer]] = {
    GroupedAttention: Attention,
    LatentAttention: LatentAttentionMixer,
}
WINDOW: dict[type[Layer], Callable[[Any, Weights], WindowAttentionMixer]] = {
    WindowAttention: WindowAttentionMixer,
}
FEED_FORWARD: dict[type[Layer], Callable[[Any, Weights], Any]] = {
    Mlp: mlp_of,
    Experts: MixtureOfExperts.of,
}

WITHOUT_PAGES: dict[type[Layer], Callable[[Any, Weights], Any]] = {**RECURRENT, **WINDOW, **FEED_FORWARD}


def build_model(spec: ModelSpec, tensors: CheckpointTensors) -> HybridModel:
    """Pack the weights one layer after the other. Raises CheckpointError for a missing or misshapen tensor."""
    prefix = next((p for p in spec.prefixes if p + spec.embedding in tensors), spec.prefixes[0])
    blocks: list[Residual] = []
    mixers: list[Any] = []
    for block in spec.blocks:
        functions = []
        for part in block.parts:
            index = len(mixers)
            weights = Weights(_tensors_of(part, tensors, prefix), tensors.dtype, tensors.device)
            mixers.append(_mixer(index, part.layer, weights))
            functions.append(_function(index, part.layer, mixers[index]))
        blocks.append(Residual(block, _norm(spec, block.norm, tensors, prefix), tuple(functions)))
    table_VC = tensors.raw(prefix + spec.embedding, spec.vocab_size, spec.hidden_size).to(tensors.device)
    embed = Embedding(table_VC.to(tensors.dtype, copy=True))  # a copy, so that nothing keeps the file mapped
    top = Weights({"head.weight": _head(spec, tensors)}, tensors.dtype, tensors.device) if not spec.tied else None
    head = embed.head() if top is None else top.linear("head")
    remembering = Mixers(*(_of_kind(kinds, spec, mixers) for kinds in (RECURRENT, ATTENTION, WINDOW)))
    return HybridModel(spec, blocks, remembering, embed, _norm(spec, spec.final_norm, tensors, prefix), head)


def layer_function(index: int, layer: Layer, weights: Weights) -> Function:
    """What a layer computes, given its weights; `index` is its number in arena and state memory."""
    return _function(index, layer, _mixer(index, layer, weights))


def _mixer(index: int, layer: Layer, weights: Weights) -> Any:
    kind = type(layer)
    if kind in ATTENTION:
        return ATTENTION[kind](index, layer, weights)
    return WITHOUT_PAGES[kind](layer, weights)


def _function(index: int, layer: Layer, mixer: Any) -> Function:
    kind = type(layer)
    if kind in RECURRENT:
        convolved = any(name == "conv" for name, _ in layer.states)
        return lambda x_NC, step: mixer.forward(x_NC, step.batch, _state(index, convolved, step))
    if kind in WINDOW:
        return lambda x_NC, step: mixer.forward(
            x_NC,
            step.batch,
            *(Rings(step.states.view(index, name)) for name in ("keys", "values")),
            _windows(index, step.segments),
        )
    if kind in ATTENTION:
        return lambda x_NC, step: mixer.forward(x_NC, step.attention)
    return lambda x_NC, step: mixer.forward(x_NC, step.batch.n_prefill)


def _state(index: int, convolved: bool, step: Step) -> LayerState:
    conv = step.states.view(index, "conv") if convolved else None
    transition = step.transitions.view(index, "transition") if step.transitions else None
    segments = tuple(
        SegmentState(
            segment.transitions.view(index, "transition") if segment.transitions else None,
            segment.states.view(index, "recurrent"),
            segment.states.view(index, "conv") if convolved else None,
        )
        for segment in step.segments
    )
    return LayerState(step.states.view(index, "recurrent"), conv, transition, segments)


def _windows(index: int, segments: Sequence[Segment]) -> tuple[SegmentWindow, ...]:
    return tuple(
        SegmentWindow(s.states.view(index, "keys"), s.states.view(index, "values"), s.interior) for s in segments
    )


def _of_kind(kinds: Mapping[type[Layer], Any], spec: ModelSpec, mixers: list[Any]) -> dict[int, Any]:
    """The layers of these kinds by their number."""
    return {i: mixer for i, mixer in enumerate(mixers) if type(spec.layers[i]) in kinds}


def _tensors_of(part: Part, tensors: CheckpointTensors, prefix: str) -> Mapping[str, torch.Tensor]:
    return PartTensors(tensors, f"{prefix}{part.at}." if part.at else prefix, part.layer.tensors(), part.names)


def _norm(spec: ModelSpec, name: str, tensors: CheckpointTensors, prefix: str) -> RMSNorm:
    weight_C = tensors.raw(prefix + name, spec.hidden_size).to(tensors.device)
    return RMSNorm(weight_C, spec.norm_eps, spec.norm_offset)


def _head(spec: ModelSpec, tensors: CheckpointTensors) -> torch.Tensor:
    return tensors.raw(spec.head, spec.vocab_size, spec.hidden_size)
