"""Start-up self-check of the Triton kernels: a sequence has the same bits by itself, among others, and cut.

It runs the kernels of the model, at its heads and widths, on random inputs; projections have a check of their own.

L tokens of a sequence, C convolved channels, G KV heads, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwater.layers.attention import GroupedAttention, WindowAttention
from headwater.layers.feed_forward import Experts
from headwater.layers.layer import Layer
from headwater.layers.mla import LatentAttention
from headwater.mixers.batch import StepBatch
from headwater.mixers.gpu import attention, mla
from headwater.mixers.gpu import experts as routed
from headwater.mixers.gpu.attention import Decoding, PagedStep
from headwater.mixers.gpu.ragged import ragged_of
from headwater.mixers.gpu.recurrent import KERNELS, RecurrentOnGpu
from headwater.mixers.mla import expanded_heads
from headwater.mixers.recurrent import LayerState, RecurrentMixer
from headwater.mixers.slices import CHUNK, Slice

# tokens of the sequence under test and of the one before it; products of batches change with the number of chunks
LENGTH, COMPANY = 17 * CHUNK + 9, CHUNK + 5
CUTS = (CHUNK, 2 * CHUNK)
BEGINNINGS = (7, 63)  # rows of a chunk, without those after them
MID_PAGE = CHUNK + 7  # where attention may begin, too
SEQUENCES = (1, 2, 3, 7)
LENGTHS = (1, 64, 65, 300, 1024, 1025, 130)  # tokens of sequences that decode together: of one split of keys, and two
PAGE = 64

Random = Callable[..., Tensor]
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Piece:
    """The next rows of a sequence to compute: [first, first + length) of all rows."""

    first: int
    length: int
    start: int  # position in the sequence
    slot: int


def steps(cut: int) -> Iterator[tuple[Piece, ...]]:
    """Yield two steps: a sequence's first piece, then its second piece after another sequence."""
    yield (Piece(0, cut, 0, 0),)
    yield Piece(LENGTH, COMPANY, 0, 1), Piece(cut, LENGTH - cut, cut, 0)


def batch_of(pieces: tuple[Piece, ...], tables: list[Tensor], position_B: Tensor) -> StepBatch:
    """Build a step of these pieces, with pages by slot, or of decoding sequences (slots in order)."""
    slices, first = [], 0
    for piece in pieces:
        slices.append(Slice(first, piece.length, piece.start, piece.slot, tables[piece.slot], 0))
        first += piece.length
    slot_B = torch.arange(len(position_B), device=position_B.device)
    position_N = torch.cat([position_B.new_empty(first), position_B])
    decoding = tuple(tables[: len(position_B)])
    return StepBatch(position_N, position_N, tuple(slices), slot_B, decoding, slot_B)


Recurrent = Mapping[Layer, tuple[Layer, RecurrentMixer[Any]]]  # by layer: the layer in a narrow model, and its mixer


def is_covered(layer: Layer, recurrent: Recurrent) -> bool:
    """Return whether the kernels compute all of a layer, but for products."""
    attends = isinstance(layer, (GroupedAttention, LatentAttention))
    return attends or (layer in recurrent and type(recurrent[layer][1]) in KERNELS)


def broken_kernels(layers: Collection[Layer], recurrent: Recurrent, random: Random, device: str) -> Iterator[str]:
    """Name each kernel of these layers whose bits depend on cuts or on other sequences."""
    grouped = [layer for layer in layers if isinstance(layer, GroupedAttention)]
    shapes = {(x.kv_heads, x.heads // x.kv_heads, x.head_dim) for x in grouped}
    shapes |= {expanded_heads(layer) for layer in layers if isinstance(layer, LatentAttention)}
    for shape in sorted(shapes):
        yield from broken_attention(shape, random, device, any(layer.sinks for layer in grouped))
    for window in sorted({layer for layer in layers if isinstance(layer, WindowAttention)}, key=repr):
        yield from broken_window(window, random, device)
    for latent in sorted({layer for layer in layers if isinstance(layer, LatentAttention)}, key=repr):
        yield from broken_latent_attention(latent, random, device)
    for narrow, mixer in recurrent.values():
        if type(mixer) in KERNELS:
            yield from broken_recurrence(narrow, mixer, random, device)
    for experts in sorted({layer for layer in layers if isinstance(layer, Experts)}, key=repr):
        yield from broken_experts(experts, random, device)


def broken_recurrence(layer: Layer, mixer: RecurrentMixer[Any], random: Random, device: str) -> Iterator[str]:
    """Name what breaks bits among the kernels of a recurrence and its convolution."""
    layer_on_gpu = RecurrentOnGpu(mixer)
    n_rows = LENGTH + COMPANY
    positions = torch.arange(n_rows, device=device)
    rows = mixer.project(random(n_rows, layer.hidden).float(), batch_of((), [], positions[:0]))
    shapes = dict(layer.states)
    before = {name: random(max(SEQUENCES), *shape).float() for name, shape in shapes.items()}
    tables = [positions[:0]] * max(SEQUENCES)

    def prefill(*in_turn: tuple[Piece, ...]) -> Tensors:
        """Return what the last piece of each step reads, and its sequence's states after all steps."""
        state = _state(before)
        reads = []
        for pieces in in_turn:
            at = torch.cat([positions[p.first : p.first + p.length] for p in pieces])
            ragged = ragged_of(batch_of(pieces, tables, positions[:0]).rounds[0])
            read = layer_on_gpu.prefill(rows.mixed_NC[at], rows.gates_NX[at], ragged, state)
            reads.append(read[-pieces[-1].length :])
        return torch.cat(reads), *(t[0] for t in (state.recurrent, state.conv) if t is not None)

    def decode(at: slice) -> Tensors:
        state = _state({name: t[at] for name, t in before.items()})
        slot_B = torch.arange(at.stop - at.start, device=device)
        read = layer_on_gpu.decode(rows.mixed_NC[at], rows.gates_NX[at], slot_B, state)
        return read, *(t for t in (state.recurrent, state.conv) if t is not None)

    yield from _broken(layer.kind, decode, prefill)


def broken_attention(shape: tuple[int, int, int], random: Random, device: str, sunk: bool = False) -> Iterator[str]:
    """Name what breaks bits in paged attention; `shape` is KV heads, query heads that share one, and channels."""
    n_kv, sharing, width = shape
    sink_H, scale = random(n_kv * sharing).float() if sunk else None, width**-0.5
    tables, position_B = _paged(device)
    n_pages = sum(len(table) for table in tables)
    keys_values = (random(n_pages, PAGE * n_kv * width), random(n_pages, PAGE * n_kv * width))
    q_NHD = random(LENGTH + COMPANY, n_kv * sharing, width)

    def prefill(*in_turn: tuple[Piece, ...]) -> Tensors:
        reads = []
        for pieces in in_turn:
            q_PHD = torch.cat([q_NHD[p.first : p.first + p.length] for p in pieces])
            step = PagedStep.of(batch_of(pieces, tables, position_B[:0]), PAGE)
            read_PHD = attention.prefill(q_PHD, keys_values, step, PAGE, scale, sink_H=sink_H)
            reads.append(read_PHD[-pieces[-1].length :])
        return (torch.cat(reads),)

    def decode(at: slice) -> Tensors:
        step = _decoding(tables[at], position_B[at])
        return (attention.decode(q_NHD[at], keys_values, step, PAGE, scale, sink_H=sink_H),)

    yield from _broken("attention", decode, prefill, (*CUTS, MID_PAGE))


def broken_window(layer: WindowAttention, random: Random, device: str) -> Iterator[str]:
    """Name what breaks bits in prefill over a window: cuts, or where the keys are laid out from."""
    n_keys = -(-LENGTH // CHUNK) * CHUNK
    keys_values = (random(n_keys, layer.kv_heads, layer.head_dim), random(n_keys, layer.kv_heads, layer.head_dim))
    q_TGQD, scale = random(LENGTH, layer.kv_heads, layer.heads // layer.kv_heads, layer.head_dim), layer.head_dim**-0.5
    sink_H = random(layer.heads).float() if layer.sinks else None

    def part(first: int, last: int) -> Tensor:
        at = max(0, first - layer.window) // CHUNK * CHUNK
        seen = tuple(x[at:] for x in keys_values)
        return attention.prefill_alone(q_TGQD[first:last], (seen[0], seen[1]), first - at, scale, layer.window, sink_H)

    whole_TGQD = part(0, LENGTH)
    for cut in (*CUTS, MID_PAGE):
        if not torch.equal(torch.cat((part(0, cut), part(cut, LENGTH))), whole_TGQD):
            yield f"{layer.kind} cut at {cut} tokens"


def broken_latent_attention(layer: LatentAttention, random: Random, device: str) -> Iterator[str]:
    """Name what breaks bits in decode over latents."""
    (width,) = layer.kv_widths
    tables, position_B = _paged(device)
    pages = random(sum(len(table) for table in tables), PAGE * width)
    q_BHX, scale = random(len(LENGTHS), layer.heads, width), layer.score_scale

    def decode(at: slice) -> Tensors:
        return (mla.decode(q_BHX[at], pages, _decoding(tables[at], position_B[at]), PAGE, scale, layer.latent),)

    yield from _broken(layer.kind, decode)


def broken_experts(layer: Experts, random: Random, device: str) -> Iterator[str]:
    """Name what breaks bits in products of decoding rows, each with a weight of its own (one of two)."""
    expert = layer.expert
    x_RK, weight_ENK = random(max(SEQUENCES), expert.hidden), random(2, expert.intermediate, expert.hidden)
    expert_R = torch.arange(len(x_RK), device=device) % 2

    def decode(at: slice) -> Tensors:
        return (routed.routed_product(x_RK[at], weight_ENK, expert_R[at]),)

    yield from _broken(layer.kind, decode)


def _paged(device: str) -> tuple[list[Tensor], Tensor]:
    """Return page tables of decoding sequences, each as long as the longest needs, and their last positions."""
    longest = -(-max(*LENGTHS, LENGTH) // PAGE)
    tables = torch.arange(len(LENGTHS) * longest, device=device).view(len(LENGTHS), longest)
    return list(tables), torch.tensor(LENGTHS, device=device) - 1


def _decoding(tables: list[Tensor], position_B: Tensor) -> Decoding:
    """Build a step with tables as long as the longest of these sequences needs, which fixes the number of splits."""
    n_pages = int(position_B.max()) // PAGE + 1
    return PagedStep.of(batch_of((), [table[:n_pages] for table in tables], position_B), PAGE)


def _state(rows: dict[str, Tensor]) -> LayerState:
    return LayerState(rows["recurrent"].clone(), rows["conv"].clone() if "conv" in rows else None)


def _broken(
    kind: str,
    decode: Callable[[slice], Tensors],
    prefill: Callable[..., Tensors] | None = None,
    cuts: tuple[int, ...] = CUTS,
) -> Iterator[str]:
    """Name the cuts and beginnings of a sequence and the counts of decoding sequences that change bits."""
    if prefill is not None:
        whole = prefill((Piece(0, LENGTH, 0, 0),))
        yield from (f"{kind} cut at {cut} tokens, in company" for cut in cuts if not _same(prefill(*steps(cut)), whole))
        for n in BEGINNINGS:
            read, *_ = prefill((Piece(0, CHUNK, 0, 0),), (Piece(CHUNK, n, CHUNK, 0),))
            if not torch.equal(read, whole[0][: CHUNK + n]):
                yield f"{kind} at the first {n} rows"
    n = max(SEQUENCES)
    together = decode(slice(0, n))
    for count in SEQUENCES:
        for at in (slice(0, count), slice(n - count, n)):
            if not _same(decode(at), tuple(of[at] for of in together)):
                yield f"{kind} at {count} decoding sequences"


def _same(some: Tensors, others: Tensors) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
