"""Models whose attention layers do something else than they did."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace

import torch

from headwater.models.hybrid import Function, HybridModel, Mixers, Step


def with_attention(model: HybridModel, change: Callable[[int, Function], Function]) -> HybridModel:
    """The same model, each attention layer, with a window or without, by its number, having another function."""
    attention = {*model.mixers.attention, *model.mixers.windows}
    changed, blocks, layer = copy(model), [], 0
    for block in model.blocks:
        functions = []
        for function in block.functions:
            functions.append(change(layer, function) if layer in attention else function)
            layer += 1
        blocks.append(replace(block, functions=tuple(functions)))
    changed.blocks = blocks
    return changed


def without_attention(model: HybridModel) -> HybridModel:
    """Attention layers add nothing and keep nothing (HYPIC, section 6.3, table 4). It shares all weights."""

    def nothing(x_NC: torch.Tensor, step: Step) -> torch.Tensor:
        return torch.zeros_like(x_NC)

    skipping = with_attention(model, lambda layer, function: nothing)
    skipping.mixers = Mixers(model.mixers.recurrent, {}, {})
    return skipping
