"""Building a model from a checkpoint's tensors, with the classes that compute each kind of layer on its device.

The names of tensors come from the spec.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headwater import kernels
from headwater.layers.attention import GroupedAttention, WindowAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.gdn import DeltaNet
from headwater.layers.kda import DeltaAttention
from headwater.layers.layer import GROUP, Layer
from headwater.layers.lightning import Lightning
from headwater.layers.mamba import Mamba
from headwater.layers.mamba2 import Mamba2
from headwater.layers.mla import LatentAttention
from headwater.layers.short_conv import ShortConv
from headwater.machine import return_free_memory
from headwater.mixers.activations import RMSNorm, StreamNorm, Unnormed
from headwater.mixers.attention import Attention, AttentionStep
from headwater.mixers.feed_forward import MixtureOfExperts, mlp_of
from headwater.mixers.gdn import GatedDeltaNet
from headwater.mixers.gpu import has_kernels
from headwater.mixers.kda import KimiDeltaAttention
from headwater.mixers.lightning import LightningAttention
from headwater.mixers.linear import Embedding, Linear
from headwater.mixers.mamba import SelectiveStateSpace
from headwater.mixers.mamba2 import StateSpaceDual
from headwater.mixers.mla import LatentAttentionMixer
from headwater.mixers.quantised import Quantised
from headwater.mixers.recurrent import RecurrentMixer
from headwater.mixers.short_conv import GatedShortConvolution
from headwater.mixers.weights import Stored, Weights
from headwater.mixers.window import WindowAttentionMixer
from headwater.models import hybrid
from headwater.models.mtp import MtpModule
from headwater.models.quantiser import BITS, Convert, QuantisedTensors, converted
from headwater.models.tensors import ModelTensors, PartTensors
from headwater.spec import ModelSpec

log = logging.getLogger("headwater.models")

RECURRENT: dict[type[Layer], Callable[[Any, Weights], RecurrentMixer[Any]]] = {
    DeltaAttention: KimiDeltaAttention,
    DeltaNet: GatedDeltaNet,
    Lightning: LightningAttention,
    Mamba2: StateSpaceDual,
    Mamba: SelectiveStateSpace,
    ShortConv: GatedShortConvolution,
}


@dataclass(frozen=True)
class LayerClasses:
    """The classes that compute layers on one kind of device, by default in torch; each has the recurrent mixers."""

    recurrent: Callable[[RecurrentMixer[Any]], hybrid.RecurrentLayer] = lambda mixer: mixer  # as the device runs it
    attention: Callable[[int, GroupedAttention, Weights], Attention] = Attention
    latent_attention: Callable[[int, LatentAttention, Weights], LatentAttentionMixer] = LatentAttentionMixer
    window: Callable[[WindowAttention, Weights], WindowAttentionMixer] = WindowAttentionMixer
    experts: type[MixtureOfExperts] = MixtureOfExperts
    attention_step: type[AttentionStep] = AttentionStep
    stream_norm: type[StreamNorm] = StreamNorm
    embedding: type[Embedding] = Embedding


def layer_classes(device: torch.device | str) -> LayerClasses:
    """Return the classes for a device: with kernels for a GPU, which need Triton, or for a CPU, which need numba."""
    if not has_kernels(device):
        return _on_cpu() if torch.device(device).type == "cpu" and kernels.available() else LayerClasses()
    from headwater.mixers.gpu.attention import AttentionOnGpu, AttentionStepOnGpu, WindowAttentionOnGpu
    from headwater.mixers.gpu.experts import ExpertsOnGpu
    from headwater.mixers.gpu.mla import LatentAttentionOnGpu
    from headwater.mixers.gpu.recurrent import RecurrentOnGpu

    return LayerClasses(
        RecurrentOnGpu, AttentionOnGpu, LatentAttentionOnGpu, WindowAttentionOnGpu, ExpertsOnGpu, AttentionStepOnGpu
    )


def _on_cpu() -> LayerClasses:
    from headwater.mixers.cpu.attention import (
        AttentionStepOnCpu,
        attention_of,
        latent_attention_of,
        window_attention_of,
    )
    from headwater.mixers.cpu.experts import ExpertsOnCpu
    from headwater.mixers.cpu.recurrent import on_cpu
    from headwater.mixers.cpu.stream import EmbeddingOnCpu, StreamNormOnCpu

    return LayerClasses(
        recurrent=on_cpu,
        attention=attention_of,
        latent_attention=latent_attention_of,
        window=window_attention_of,
        experts=ExpertsOnCpu,
        attention_step=AttentionStepOnCpu,
        stream_norm=StreamNormOnCpu,
        embedding=EmbeddingOnCpu,
    )


def build_model(spec: ModelSpec, tensors: ModelTensors, convert: Convert = converted) -> hybrid.HybridModel:
    """Pack the weights one layer after the other. Raises CheckpointError for a missing or misshapen tensor.

    `convert` quantises weights for `--weights`.

    Memory at its peak is that of the packed weights, and of one layer besides: the content of files, and values made
    from it, are released after each layer. Embedding and head, the largest, come first.
    """
    if spec.weights != "auto":
        _tell_of_undivided(spec)
    prefix = next((p for p in spec.prefixes if p + spec.embedding in tensors), spec.prefixes[0])
    embed, head = _ends(spec, tensors, prefix, convert)
    mixers = hybrid.Mixers({}, {}, {})
    blocks = list(_blocks(spec, tensors, prefix, mixers, convert))
    norm = _norm(spec, spec.final_norm, tensors, prefix)
    return hybrid.HybridModel(spec, blocks, mixers, embed, norm, head, layer_classes(tensors.device).attention_step)


def build_mtp(
    spec: ModelSpec, tensors: ModelTensors, model: hybrid.HybridModel, convert: Convert = converted
) -> MtpModule:
    """Pack the weights of a model's MTP head. Raises CheckpointError if it has none, or for a misshapen tensor."""
    of_mtp, head = spec.of_mtp, spec.mtp
    assert head is not None
    norms = _norm(spec, head.embedding_norm, tensors, ""), _norm(spec, head.hidden_norm, tensors, "")
    product = tensors.stored(head.product, spec.hidden_size, 2 * spec.hidden_size)
    linear = Weights({"product.weight": product}, tensors.dtype, tensors.device).linear("product")
    blocks = list(_blocks(of_mtp, tensors, "", hybrid.Mixers({}, {}, {}), convert))
    return MtpModule(of_mtp, model, norms, linear, blocks, _norm(spec, of_mtp.final_norm, tensors, ""))


def _blocks(
    spec: ModelSpec, tensors: ModelTensors, prefix: str, mixers: hybrid.Mixers, convert: Convert
) -> Iterator[hybrid.Residual]:
    """Build the blocks one after the other; release the content of files after each."""
    index = 0
    for block in spec.blocks:
        functions = []
        for part in block.parts:
            at = f"{prefix}{part.at}."
            held: Mapping[str, Stored] = PartTensors(tensors, at, part.layer.tensors(), part.names, part.interleaved)
            if spec.weights != "auto":
                held = QuantisedTensors(held, part.layer, BITS[spec.weights], at, convert)
            functions.append(layer_function(index, part.layer, Weights(held, tensors.dtype, tensors.device), mixers))
            index += 1
        name = block.norm if prefix + block.norm in tensors else block.norm_otherwise or block.norm
        norm = _norm(spec, name, tensors, prefix)
        before, after = (Unnormed(tensors.dtype), norm) if block.norm_after else (norm, None)
        yield hybrid.Residual(block, before, tuple(functions), after)
        _give_back(tensors)


def _ends(spec: ModelSpec, tensors: ModelTensors, prefix: str, convert: Convert) -> tuple[Embedding, Linear]:
    """Return embedding and head, which are one weight if the head is tied."""

    def end(name: str) -> Weights:
        stored = tensors.stored(name, spec.vocab_size, spec.hidden_size)
        if spec.table_format is not None and isinstance(stored, torch.Tensor):
            as_stored = stored
            stored = convert(name, lambda: as_stored, BITS[spec.table_format])
        return Weights({"end.weight": stored}, tensors.dtype, tensors.device)

    embedding, of_device = prefix + spec.embedding, layer_classes(tensors.device).embedding
    if spec.tied:
        head = end(embedding).linear("end")
        embed = of_device(head, tensors.dtype)
    else:
        weights = end(embedding)
        table = weights.held("end.weight")  # codes of integers are packed only in the layout of products
        embed = of_device(weights.linear("end") if isinstance(table, Quantised) else table, tensors.dtype)
        del weights, table
        _give_back(tensors)
        head = end(spec.head).linear("end")
    _give_back(tensors)
    return embed, head


def _give_back(tensors: ModelTensors) -> None:
    tensors.unmap()
    return_free_memory()


def layer_function(index: int, layer: Layer, weights: Weights, mixers: hybrid.Mixers | None = None) -> hybrid.Function:
    """Build a layer, the `index`-th in arena and state memory; add it to `mixers` if it keeps pages or states."""
    classes, mixers = layer_classes(weights.device), mixers or hybrid.Mixers({}, {}, {})
    if type(layer) in RECURRENT:
        mixer = mixers.recurrent[index] = RECURRENT[type(layer)](layer, weights)
        return hybrid.RecurrentFunction(index, classes.recurrent(mixer), convolved=mixer.convolution is not None)
    match layer:
        case WindowAttention():  # a kind of GroupedAttention
            window = mixers.windows[index] = classes.window(layer, weights)
            return hybrid.WindowFunction(index, window)
        case GroupedAttention():
            attention = mixers.attention[index] = classes.attention(index, layer, weights)
            return hybrid.AttentionFunction(attention)
        case LatentAttention():
            latent = mixers.attention[index] = classes.latent_attention(index, layer, weights)
            return hybrid.AttentionFunction(latent)
        case Mlp():
            return hybrid.FeedForwardFunction(mlp_of(layer, weights))
        case Experts():
            return hybrid.FeedForwardFunction(classes.experts.of(layer, weights))
    raise TypeError(f"no class computes layers of kind {layer.kind!r}")


def _tell_of_undivided(spec: ModelSpec) -> None:
    """Log one line if some weights cannot be quantised."""
    found = {
        f"{layer.kind} {name} ({shape[-1]:,})" for layer in spec.layers for name, shape in layer.undivided().items()
    }
    if found:
        log.warning(
            "weights stay as stored because no group of %d divides their inputs: %s", GROUP, ", ".join(sorted(found))
        )


def _norm(spec: ModelSpec, name: str, tensors: ModelTensors, prefix: str) -> StreamNorm:
    weight_C = tensors.raw(prefix + name, spec.hidden_size).to(tensors.device)
    norm = RMSNorm(weight_C, spec.norm_eps, spec.norm_offset)
    return layer_classes(tensors.device).stream_norm(norm, tensors.dtype)
