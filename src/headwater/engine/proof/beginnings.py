"""Self-check of beginnings: the first rows of a chunk have the bits that they have in the whole chunk.

A leg that continues a tail in mid-page relies on it: the rows before it were computed by a leg that ended there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from headwater.layers.layer import Layer
from headwater.mixers import softmax
from headwater.mixers.batch import StepBatch
from headwater.mixers.recurrent import LayerState, RecurrentMixer
from headwater.mixers.slices import CHUNK, Slice
from headwater.mixers.softmax import CausalMask
from headwater.models.build import layer_classes
from headwater.spec import KEY_BLOCK

BEGINNINGS = (1, 7, 31, 63)  # rows

Random = Callable[..., Tensor]


def states_of(layer: Layer, rows: int, random: Random) -> dict[str, Tensor]:
    """Return random states of a layer in rows of the state memory, by name."""
    found = ((name, random(rows, *shape)) for name, shape in layer.states)
    return {name: part.float() if name in layer.float32_states else part for name, part in found}


def broken_recurrence(narrow: tuple[Layer, RecurrentMixer[Any]], random: Random, device: str) -> Iterator[str]:
    """Name numbers of first rows of a chunk that have other bits without the rows after them."""
    layer, mixer = narrow
    computed, dtype = layer_classes(device).recurrent(mixer), random(1).dtype
    none = torch.empty(0, dtype=torch.int64, device=device)
    before = states_of(layer, 1, random)

    def step(n: int) -> StepBatch:
        return StepBatch(none, torch.arange(n, device=device), (Slice(0, n, 0, 0, none, 0),), none, (), none)

    products = [part.to(dtype) for part in mixer.products(random(CHUNK, layer.hidden).float(), step(CHUNK))]

    def outputs(n: int) -> Tensor:
        after = {name: part.clone() for name, part in before.items()}
        state = LayerState(after["recurrent"], after.get("conv"))
        return computed.outputs(tuple(part[:n].clone() for part in products), step(n), state)

    whole_NX = outputs(CHUNK)
    yield from (f"{layer.kind} at the first {n} rows" for n in BEGINNINGS if not torch.equal(outputs(n), whole_NX[:n]))


def broken_attention(heads: int, sharing: int, width: int, random: Random, sunk: bool = False) -> Iterator[str]:
    """Name numbers of first rows of a page that have other bits without the rows before or after them."""
    q_TGQD = random(KEY_BLOCK, heads, sharing, width)
    keys_values = random(KEY_BLOCK, heads, width), random(KEY_BLOCK, heads, width)
    sink_GQ = random(heads, sharing).float() if sunk else None
    mask = CausalMask(KEY_BLOCK, q_TGQD.dtype, q_TGQD.device)

    def attend(first: int, end: int) -> Tensor:
        out_TGQD = torch.empty_like(q_TGQD[first:end])
        softmax.prefill_into(out_TGQD, q_TGQD[first:end], keys_values, first, mask, sink_GQ=sink_GQ)
        return out_TGQD

    page = KEY_BLOCK - CHUNK
    whole_TGQD = attend(page, KEY_BLOCK)
    for n in BEGINNINGS:
        parts = torch.cat((attend(page, page + n), attend(page + n, KEY_BLOCK)))
        if not torch.equal(parts, whole_TGQD):
            yield f"attention at the first {n} rows"
