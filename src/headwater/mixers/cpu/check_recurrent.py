"""The start-up self-check of decode kernels: a sequence has the same bits alone, beside others, and on any threads.

It runs the kernel of a layer at its heads and widths, in the model's dtype; products have a check of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from headwater.kernels.compiling import threads_in_use, use_threads
from headwater.layers.layer import Layer
from headwater.mixers.batch import StepBatch
from headwater.mixers.cpu.recurrent import RecurrentOnCpu, on_cpu
from headwater.mixers.recurrent import LayerState, RecurrentMixer

SEQUENCES = (1, 2, 3, 7)
DENORMAL = 1e-39  # a thread that keeps such numbers gives other bits than one that flushes them to zero

Random = Callable[..., Tensor]


def broken_recurrence(layer: Layer, mixer: RecurrentMixer[Any], random: Random) -> Iterator[str]:
    """Name counts of sequences and of threads at which a layer's kernel changes bits."""
    computed = on_cpu(mixer)
    if not isinstance(computed, RecurrentOnCpu):
        return
    decode, everyone, threads = Decoding(layer, computed, random), list(range(max(SEQUENCES))), threads_in_use()
    whole = decode(everyone)

    def same(of: list[int]) -> bool:
        return all(torch.equal(part, of_all[of]) for part, of_all in zip(decode(of), whole, strict=True))

    for count in SEQUENCES:
        if not (same(everyone[:count]) and same(everyone[::-1][:count])):
            yield f"{layer.kind} at {count} sequences that a kernel decodes"
    try:
        for count in range(1, threads):
            use_threads(count)
            if not same(everyone):
                yield f"{layer.kind} on {count} of {threads} threads of a kernel"
    finally:
        use_threads(threads)


class Decoding:
    """Random rows and states of sequences, half of them denormal numbers, of which any are decoded together."""

    def __init__(self, layer: Layer, computed: RecurrentOnCpu, random: Random) -> None:
        n = max(SEQUENCES)
        self.computed, self.dtype = computed, random(1).dtype
        self.states = {name: random(n, *shape) for name, shape in layer.states}
        self.states["recurrent"] = self.states["recurrent"].float()
        x_BD = random(n, layer.hidden).float()
        for part in (x_BD, *self.states.values()):
            part[n // 2 :] *= DENORMAL
        products = computed.mixer.products(x_BD, step_of(list(range(n))))
        self.products = tuple(product.to(self.dtype) for product in products)

    def __call__(self, of: list[int]) -> tuple[Tensor, ...]:
        """Return what these sequences read, each in the slot of its number, and their states after it."""
        after = {name: part.clone() for name, part in self.states.items()}
        out_BX = torch.empty(len(of), self.computed.mixer.out_proj.n_in, dtype=self.dtype)
        state = LayerState(after["recurrent"], after.get("conv"))
        self.computed.decode_into(out_BX, tuple(product[of] for product in self.products), step_of(of), state)
        return out_BX, *(part[of] for part in after.values())


def step_of(sequences: list[int]) -> StepBatch:
    """Build a step that decodes these sequences, each in the slot of its number."""
    none, slots = torch.empty(0, dtype=torch.int64), torch.tensor(sequences)
    return StepBatch(none, slots, (), slots, (none,) * len(sequences), none)
