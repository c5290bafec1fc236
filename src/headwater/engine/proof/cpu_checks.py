"""Self-checks of CPU kernels by kind of layer: a row has the same bits by itself, among others, and on any threads.

Kernels run in the model's dtype. Attention has a layer's shape, pages with random content, and NaN where rows write
their own keys and values, so that a missing or late write is found. Recurrent layers have their heads and widths;
products have a check of their own. A prompt must have the same bits if it is computed in two steps, too, and a
sequence's next tokens in one step or in turn. Experts are few and narrow, with weights in the model's dtype, in
bfloat16 and in the format of 8 bits and fewer that the model's weights have. Some channels have denormal results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.engine.proof.beginnings import states_of
from headwater.kernels.attention import SPLIT
from headwater.kernels.compiling import threads_in_use, use_threads
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts
from headwater.layers.layer import Layer
from headwater.mixers.attention import Heads
from headwater.mixers.batch import STATE, StepBatch
from headwater.mixers.cpu.attention import DecodeKernel, DecodeRows, Pages
from headwater.mixers.cpu.experts import ExpertsOnCpu
from headwater.mixers.cpu.recurrent import Memory, PrefillKernel, RecurrentOnCpu, on_cpu
from headwater.mixers.drafts import Kept
from headwater.mixers.numerics import TINY, same_bits
from headwater.mixers.products import Weight, rows
from headwater.mixers.recurrent import LayerState, RecurrentMixer
from headwater.mixers.slices import CHUNK, Slice
from headwater.mixers.weights import Stored, Weights

NARROW = 64  # width of attention, and of experts, whose intermediate size it is, too
SEQUENCES = (1, 2, 3, 7)
PAGES, PAGE = 4, SPLIT  # of a sequence, and tokens of each
ADJACENT_TOKENS = 7  # of one sequence, across the end of a page
TOKENS = ((0, 1, 2), (3,), (4, 5, 6))  # rows of three sequences
ROWS = [row for of_one in TOKENS for row in of_one]
PROMPTS = (CHUNK + 7, 2 * CHUNK, 3)  # tokens of sequences that are prefilled together
WHOLE, CUT = (slice(0, None),), (slice(0, CHUNK), slice(CHUNK, None))
EXPERT_ROWS = (1, 2, 3, 7, 33)
MAX_GROUP_EXPERTS = 16

Random = Callable[..., Tensor]
Pack = Callable[[Tensor], Weight | None]  # None if the format does not take the weight's inputs


def _fewer_threads() -> Iterator[int]:
    """Yield each smaller number of threads, which kernels use until the next one."""
    threads = threads_in_use()
    try:
        for count in range(1, threads):
            use_threads(count)
            yield count
    finally:
        use_threads(threads)


def broken_attention(layer: GroupedAttention, random: Random) -> Iterator[str]:
    """Name counts of sequences and of threads at which the kernels of a layer change bits."""
    if not DecodeKernel.takes(layer):
        return
    narrow = replace(layer, hidden=NARROW)
    dtype = random(1).dtype
    heads = Heads(narrow, Weights({name: random(*size) for name, size in narrow.tensors().items()}, dtype))
    decode, n = AttentionRows(narrow, DecodeKernel(narrow, heads), random), SEQUENCES[-1]
    everyone, tokens = list(range(n)), list(range(n, n + ADJACENT_TOKENS))
    if not decode.same(tokens, decode(tokens), decode(*([row] for row in tokens))):
        yield f"kernel of {layer.kind} at {ADJACENT_TOKENS} tokens of a sequence"
    whole = decode(everyone)
    for count in SEQUENCES:
        for some in (everyone[:count], everyone[-count:]):
            reads_BX, *pages = whole
            if not decode.same(some, decode(some), (reads_BX[some], *pages)):
                yield f"kernel of {layer.kind} at {count} decoding sequences"
    for fewer in _fewer_threads():
        if not decode.same(everyone, decode(everyone), whole):
            yield f"kernel of {layer.kind} on {fewer} threads"


class AttentionRows:
    """Random rows of several sequences, then several rows of one, of which any are decoded together."""

    def __init__(self, layer: GroupedAttention, kernel: DecodeKernel, random: Random) -> None:
        n, self.kernel, self.width = SEQUENCES[-1], kernel, layer.heads * layer.head_dim
        keys = layer.kv_heads * layer.head_dim
        lengths = [PAGES * PAGE * (i + 1) // n - i % 2 for i in range(n)]
        self.position_B = np.array([*lengths, *range(SPLIT, SPLIT + ADJACENT_TOKENS)], np.int64) - 1
        self.table_BT = np.arange((n + 1) * PAGES).reshape(n + 1, PAGES)[[*range(n), *[n] * ADJACENT_TOKENS]]
        self.qkv_BX = random(n + ADJACENT_TOKENS, (2 if layer.gated else 1) * self.width + 2 * keys)
        self.before = random((n + 1) * PAGES, PAGE * keys), random((n + 1) * PAGES, PAGE * keys)
        for values in (self.before[1], self.qkv_BX[:, -keys:]):
            values.unflatten(1, (-1, layer.head_dim))[..., ::5] *= TINY
        pages, places = self.table_BT[range(n + ADJACENT_TOKENS), self.position_B // PAGE], self.position_B % PAGE
        for part in self.before:
            part.unflatten(1, (PAGE, keys))[pages, places] = torch.nan

    def __call__(self, *steps: list[int]) -> tuple[Tensor, ...]:
        """Return what rows read, those of a step at once, and the keys and values of all pages after them."""
        after, reads = tuple(part.clone() for part in self.before), []
        for step in steps:
            position_B = self.position_B[step]
            read_BX = self.qkv_BX.new_empty(len(step), self.width)
            of_step = DecodeRows(position_B, self.table_BT[step], int(position_B.max()) + 1)
            self.kernel.decode_into(read_BX, self.qkv_BX[step], of_step, Pages.of(after, PAGE))
            reads.append(read_BX)
        return torch.cat(reads), *after

    def same(self, rows: list[int], one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
        """Return whether these rows read the same, and their pages hold the same."""
        (read_BX, *pages), (other_BX, *others), table = one, other, self.table_BT[rows].ravel()
        return same_bits(read_BX, other_BX) and all(
            same_bits(part[table], of_other[table]) for part, of_other in zip(pages, others, strict=True)
        )


def broken_decode(layer: Layer, mixer: RecurrentMixer[Any], random: Random) -> Iterator[str]:
    """Name counts of sequences and of threads at which a layer's kernel for decoding changes bits."""
    computed = on_cpu(mixer)
    if not isinstance(computed, RecurrentOnCpu):
        return
    decode = RecurrentRows(layer, computed, random)
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
    prefill = RecurrentPrompts(layer, computed, computed.prefill, random)
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


class RecurrentRows:
    """Random rows and states of sequences, half of them with denormal products, of which any are decoded together."""

    def __init__(self, layer: Layer, computed: RecurrentOnCpu, random: Random) -> None:
        n = max(SEQUENCES)
        self.computed, self.dtype = computed, random(1).dtype
        self.states = states_of(layer, n, random)
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


class RecurrentPrompts:
    """Random prompts and states before them, one of them with denormal products, each in the slot of its number.

    Any of them are prefilled together.
    """

    def __init__(self, layer: Layer, computed: RecurrentOnCpu, kernel: PrefillKernel, random: Random) -> None:
        n = len(PROMPTS)
        self.computed, self.kernel, self.dtype = computed, kernel, random(1).dtype
        self.states = states_of(layer, n, random)
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


def broken_experts(layer: Experts, random: Random, packs: Mapping[str, Pack]) -> Iterator[str]:
    """Name numbers of rows and of threads at which experts change a row's bits.

    `packs` has the formats of 8 bits and fewer by name, and for each the function that packs a weight in it.
    """
    dtype, threads, narrow = random(1).dtype, threads_in_use(), narrowed(layer)
    x_NX, logits_NE = random(max(EXPERT_ROWS), narrow.expert.hidden), random(max(EXPERT_ROWS), narrow.experts)
    for name, tensors in _tensors(narrow, random, dtype, packs):
        experts = ExpertsOnCpu.of(narrow, Weights(tensors, dtype))
        if not isinstance(experts, ExpertsOnCpu):
            return
        whole_NX = experts.by_logits(x_NX, logits_NE)
        for n in EXPERT_ROWS:
            ends = slice(n), slice(-n, None)
            if not all(same_bits(experts.by_logits(x_NX[at], logits_NE[at]), whole_NX[at]) for at in ends):
                yield f"{layer.kind}{name} at {n} rows"
        for count in _fewer_threads():
            if not same_bits(experts.by_logits(x_NX, logits_NE), whole_NX):
                yield f"{layer.kind}{name} on {count} of {threads} threads of a kernel"


def _tensors(
    narrow: Experts, random: Random, dtype: torch.dtype, packs: Mapping[str, Pack]
) -> Iterator[tuple[str, dict[str, Stored]]]:
    """Yield a layer's tensors with its experts in each format, and the format's name if it is packed."""
    for stored in dict.fromkeys((dtype, torch.bfloat16)):
        tensors = {name: random(*shape).to(stored) for name, shape in narrow.tensors().items()}
        tiny_EXI = tensors["experts.down_proj.weight"][:, ::5].zero_()
        tiny_EXI.diagonal(dim1=1, dim2=2).fill_(TINY)  # one input of an output: inputs below a half give denormals
        yield "", {**tensors}
    stacked = {name: random(*shape) for name, shape in narrow.tensors().items() if is_packed(name)}
    for form, pack in packs.items():
        packed = {name: _packed(weight_ENK, pack) for name, weight_ENK in stacked.items()}
        yield f" with weights in {form}", {**tensors, **packed}


def is_packed(name: str) -> bool:
    """Return whether a tensor of a layer is the weight of its routed experts."""
    return name.startswith("experts.") and name.endswith(".weight")


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
