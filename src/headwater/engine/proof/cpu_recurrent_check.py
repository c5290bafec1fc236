"""Start-up self-check of recurrent kernels: a sequence has the same bits by itself, among others, on any threads.

It runs the kernels of a layer at its heads and widths, in the model's dtype; products have a check of their own. A
prompt must have the same bits if it is computed in two steps, too, and a sequence's next tokens in one step or in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headwater.kernels.compiling import threads_in_use, use_threads
from headwater.layers.layer import Layer
from headwater.mixers.batch import STATE, StepBatch
from headwater.mixers.cpu.recurrent import PrefillKernel, RecurrentOnCpu, on_cpu
from headwater.mixers.cpu.recurrent_kernels import Memory
from headwater.mixers.drafts import Kept
from headwater.mixers.numerics import TINY, same_bits
from headwater.mixers.recurrent import LayerState, RecurrentMixer
from headwater.mixers.slices import CHUNK, Slice

SEQUENCES = (1, 2, 3, 7)
TOKENS = ((0, 1, 2), (3,), (4, 5, 6))  # rows of three sequences
ROWS = [row for of_one in TOKENS for row in of_one]
PROMPTS = (CHUNK + 7, 2 * CHUNK, 3)  # tokens of sequences that are prefilled together
WHOLE, CUT = (slice(0, None),), (slice(0, CHUNK), slice(CHUNK, None))

Random = Callable[..., Tensor]


def broken_decode(layer: Layer, mixer: RecurrentMixer[Any], random: Random) -> Iterator[str]:
    """Name counts of sequences and of threads at which a layer's kernel for decoding changes bits."""
    computed = on_cpu(mixer)
    if not isinstance(computed, RecurrentOnCpu):
        return
    decode = Decoding(layer, computed, random)
    everyone, threads = list(range(max(SEQUENCES))), threads_in_use()
    whole = decode(everyone)

    def same(of: list[int]) -> bool:
        return all(same_bits(part, of_all[of]) for part, of_all in zip(decode(of), whole, strict=True))

    for count in SEQUENCES:
        if not (same(everyone[:count]) and same(everyone[::-1][:count])):
            yield f"{layer.kind} at {count} sequences that a kernel decodes"
    in_turn = decode.in_turn()
    if not all(map(same_bits, decode.at_once(), in_turn)):
        yield f"{layer.kind} at {len(TOKENS[0])} tokens of a sequence that a kernel decodes in one step"
    if not all(map(same_bits, decode.drafted(), in_turn)):
        yield f"{layer.kind} at {len(TOKENS[0]) - 1} drafts of a sequence, of which one is accepted"
    for count in _fewer_threads():
        if not same(everyone):
            yield f"{layer.kind} on {count} of {threads} threads of a kernel"


def broken_prefill(layer: Layer, mixer: RecurrentMixer[Any], random: Random) -> Iterator[str]:
    """Name prompts, their parts and counts of threads at which a layer's kernel for prompts, if any, changes bits."""
    computed = on_cpu(mixer)
    if not isinstance(computed, RecurrentOnCpu) or computed.prefill is None:
        return
    prefill = Prefilling(layer, computed, computed.prefill, random)
    everyone, threads = list(range(len(PROMPTS))), threads_in_use()
    whole = prefill(everyone)

    def same(of: list[int], parts: tuple[slice, ...] = WHOLE) -> bool:
        return all(all(map(same_bits, one, whole[i])) for i, one in zip(of, prefill(of, parts), strict=True))

    for i in everyone:
        if not same([i]):
            yield f"{layer.kind} at one of {len(PROMPTS)} prompts that a kernel prefills"
    if not same(everyone, CUT):
        yield f"{layer.kind} at prompts that a kernel prefills in 2 steps"
    for count in _fewer_threads():
        if not same(everyone):
            yield f"{layer.kind} on {count} of {threads} threads of a kernel that prefills"


def _fewer_threads() -> Iterator[int]:
    """Yield each smaller number of threads, which kernels use until the next one."""
    threads = threads_in_use()
    try:
        for count in range(1, threads):
            use_threads(count)
            yield count
    finally:
        use_threads(threads)


class Decoding:
    """Random rows and states of sequences, half of them with denormal products, of which any are decoded together."""

    def __init__(self, layer: Layer, computed: RecurrentOnCpu, random: Random) -> None:
        n = max(SEQUENCES)
        self.computed, self.dtype = computed, random(1).dtype
        self.states = {name: random(n, *shape) for name, shape in layer.states}
        self.states["recurrent"] = self.states["recurrent"].float()
        x_BD = random(n, layer.hidden).float()
        for part in (x_BD, *self.states.values()):
            part[n // 2 :] *= TINY
        products = computed.mixer.products(x_BD, step_of(list(range(n))))
        self.products = tuple(product.to(self.dtype) for product in products)

    def __call__(self, of: list[int]) -> tuple[Tensor, ...]:
        """Return what these sequences read, each in the slot of its number, and their states after it."""
        after = {name: part.clone() for name, part in self.states.items()}
        return self._decoded(of, step_of(of), after), *(part[of] for part in after.values())

    def at_once(self) -> tuple[Tensor, ...]:
        """Return what the tokens of three sequences read, and all states after them."""
        after = {name: part.clone() for name, part in self.states.items()}
        return self._decoded(ROWS, tokens_at_once(), after), *after.values()

    def drafted(self) -> tuple[Tensor, ...]:
        """Return the same if all but a sequence's first token are drafts, and only the first of these is accepted."""
        after, kept = {name: part.clone() for name, part in self.states.items()}, Kept()
        drafts = tuple(len(of_one) - 1 for of_one in TOKENS)
        read_BX = self._decoded(ROWS, tokens_at_once(drafts), after, kept)
        last = [(of_one[-1], slot) for slot, of_one in enumerate(TOKENS) if len(of_one) > 1]
        rows, slots = ([pair[i] for pair in last] for i in (0, 1))
        read_BX[rows] = self._decoded(rows, replace(step_of(slots, rows), accepted=(1,) * len(last)), after, kept)
        return read_BX, *after.values()

    def in_turn(self) -> tuple[Tensor, ...]:
        """Return the same of the same tokens, each in a step of its own."""
        after = {name: part.clone() for name, part in self.states.items()}
        turns = [(row, slot) for slot, of_one in enumerate(TOKENS) for row in of_one]
        reads = [self._decoded([row], step_of([slot], [row]), after) for row, slot in turns]
        return torch.cat(reads), *after.values()

    def _decoded(self, rows: list[int], step: StepBatch, after: dict[str, Tensor], kept: Kept | None = None) -> Tensor:
        out_BX = torch.empty(len(rows), self.computed.mixer.out_proj.n_in, dtype=self.dtype)
        state = LayerState(after["recurrent"], after.get("conv"), kept=kept or Kept())
        self.computed.decode_into(out_BX, tuple(product[rows] for product in self.products), step, state)
        return out_BX


class Prefilling:
    """Random prompts and states before them, one of them with denormal products, each in the slot of its number.

    Any of them are prefilled together.
    """

    def __init__(self, layer: Layer, computed: RecurrentOnCpu, kernel: PrefillKernel, random: Random) -> None:
        n = len(PROMPTS)
        self.computed, self.kernel, self.dtype = computed, kernel, random(1).dtype
        self.states = {name: random(n, *shape) for name, shape in layer.states}
        self.states["recurrent"] = self.states["recurrent"].float()
        x_ND = random(sum(PROMPTS), layer.hidden).float()
        for part in (x_ND.split(PROMPTS), *self.states.values()):
            part[n // 2].mul_(TINY)
        products = computed.mixer.products(x_ND, step_of([]))
        self.products = [product.to(self.dtype).split(PROMPTS) for product in products]

    def __call__(self, of: list[int], parts: tuple[slice, ...] = WHOLE) -> list[tuple[Tensor, ...]]:
        """Return for each sequence what its rows read, and its states after them; `parts` of prompts, a step each."""
        after = {name: part.clone() for name, part in self.states.items()}
        state, reads = LayerState(after["recurrent"], after.get("conv")), {i: list[Tensor]() for i in of}
        for part in parts:
            products = tuple(torch.cat([rows[i][part] for i in of]) for rows in self.products)
            lengths = [len(range(PROMPTS[i])[part]) for i in of]
            ends = list(accumulate(lengths))
            ranges = [(i, end - n, n) for i, end, n in zip(of, ends, lengths, strict=True) if n]
            slices = tuple(Slice(first, n, part.start, i, torch.empty(0), 0) for i, first, n in ranges)
            out_NX = torch.empty(ends[-1], self.computed.mixer.out_proj.n_in, dtype=self.dtype)
            for together in replace(step_of([]), slices=slices).rounds:
                self.kernel.prefill_into(out_NX, products, together, Memory.of(state))
            for i, read_NX in zip(of, out_NX.split(lengths), strict=True):
                reads[i].append(read_NX)
        return [(torch.cat(reads[i]), *(part[i] for part in after.values())) for i in of]


def tokens_at_once(drafted: tuple[int, ...] = ()) -> StepBatch:
    """Build a step of all tokens of three sequences, of which the last ones may be drafts."""
    slots = [slot for slot, of_one in enumerate(TOKENS) for _ in of_one]
    parents = tuple(STATE if row == of_one[0] else row - 1 for of_one in TOKENS for row in of_one)
    return replace(step_of(slots, ROWS, parents), drafted=drafted)


def step_of(slots: list[int], positions: list[int] | None = None, parents: tuple[int, ...] = ()) -> StepBatch:
    """Build a step of rows that decode the sequences in these slots; without positions they are the slots' numbers."""
    none, slot_B = torch.empty(0, dtype=torch.int64), torch.tensor(slots)
    position_B = slot_B if positions is None else torch.tensor(positions)
    return StepBatch(none, position_B, (), slot_B, (none,) * len(slots), none, parents=parents)
