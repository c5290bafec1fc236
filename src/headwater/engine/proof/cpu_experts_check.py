"""Start-up self-check of experts' kernels: a row has the same bits by itself, among others, and on any threads.

It runs a layer of few and narrow experts, in the model's dtype, with weights in that, in bfloat16 and in the format of
8 bits and fewer that the model's weights have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from headwater.kernels.compiling import threads_in_use, use_threads
from headwater.layers.feed_forward import Experts
from headwater.mixers.cpu.experts import ExpertsOnCpu
from headwater.mixers.numerics import TINY, same_bits
from headwater.mixers.products import Weight, rows
from headwater.mixers.weights import Stored, Weights

ROWS = (1, 2, 3, 7, 33)
NARROW = 64  # width and intermediate size
MAX_GROUP_EXPERTS = 16

Random = Callable[..., Tensor]
Pack = Callable[[Tensor], Weight | None]  # None if the format does not take the weight's inputs


def broken_experts(layer: Experts, random: Random, packs: Mapping[str, Pack]) -> Iterator[str]:
    """Name numbers of rows and of threads at which experts change a row's bits.

    `packs` has the formats of 8 bits and fewer by name, and for each the function that packs a weight in it.
    """
    dtype, threads, narrow = random(1).dtype, threads_in_use(), narrowed(layer)
    x_NX, logits_NE = random(max(ROWS), narrow.expert.hidden), random(max(ROWS), narrow.experts)
    for name, tensors in _tensors(narrow, random, dtype, packs):
        experts = ExpertsOnCpu.of(narrow, Weights(tensors, dtype))
        if not isinstance(experts, ExpertsOnCpu):
            return
        whole_NX = experts.by_logits(x_NX, logits_NE)
        for n in ROWS:
            ends = slice(n), slice(-n, None)
            if not all(same_bits(experts.by_logits(x_NX[at], logits_NE[at]), whole_NX[at]) for at in ends):
                yield f"{layer.kind}{name} at {n} rows"
        try:
            for count in range(1, threads):
                use_threads(count)
                if not same_bits(experts.by_logits(x_NX, logits_NE), whole_NX):
                    yield f"{layer.kind}{name} on {count} of {threads} threads of a kernel"
        finally:
            use_threads(threads)


def _tensors(
    narrow: Experts, random: Random, dtype: torch.dtype, packs: Mapping[str, Pack]
) -> Iterator[tuple[str, dict[str, Stored]]]:
    """Yield a layer's tensors with its experts in each format, and the format's name if it is packed."""
    for stored in dict.fromkeys((dtype, torch.bfloat16)):
        tensors = {name: random(*shape).to(stored) for name, shape in narrow.tensors().items()}
        tiny_EXI = tensors["experts.down_proj.weight"][:, ::5].zero_()
        tiny_EXI.diagonal(dim1=1, dim2=2).fill_(TINY)  # one input of an output: inputs below a half give denormals
        yield "", {**tensors}
    stacked = {name: random(*shape) for name, shape in narrow.tensors().items() if name.startswith("experts.")}
    for form, pack in packs.items():
        packed = {name: _packed(weight_ENK, pack) for name, weight_ENK in stacked.items()}
        yield f" with weights in {form}", {**tensors, **packed}


def _packed(weight_ENK: Tensor, pack: Pack) -> Stored:
    """Pack the weights of all experts in one form, as kernels multiply them."""
    weight = pack(weight_ENK.flatten(0, 1))
    assert weight is not None, f"{NARROW} inputs are a group of every format"
    return [rows(weight, row_N) for row_N in torch.arange(weight.shape[0]).split(weight_ENK.shape[1])]


def narrowed(layer: Experts) -> Experts:
    """Return experts with the layer's router and activations, but few of them."""
    each = min(MAX_GROUP_EXPERTS, layer.experts // layer.groups)
    per_token = min(layer.per_token, each * layer.groups_per_token)
    shared, latent = min(layer.shared, NARROW), min(layer.latent, NARROW)
    return replace(
        layer, hidden=NARROW, experts=each * layer.groups, per_token=per_token, intermediate=NARROW,
        shared=shared, latent=latent,
    )  # fmt: skip
