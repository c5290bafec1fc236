"""The self-check's part for a GPU: do its kernels give a sequence the same bits alone, in company, and cut?

They are the kernels that the model runs, at its heads and widths. What they read is random; how a row is projected is
the products' own check.

L tokens of a sequence, C convolved channels, G KV heads, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headwater.layers.feed_forward import Experts
from headwater.layers.layer import Layer
from headwater.layers.mla import LatentAttention
from headwater.mixers.batch import Slice, StepBatch
from headwater.mixers.chunks import CHUNK
from headwater.mixers.recurrent import LayerState, RecurrentMixer

if TYPE_CHECKING:  # it needs Triton
    from headwater.mixers.attention.gpu import Decoding

LENGTH, COMPANY = 2 * CHUNK + 9, CHUNK + 5  # tokens of the sequence that is watched, and of the one before it
CUTS = (CHUNK, 2 * CHUNK)
SEQUENCES = (1, 2, 3, 7)
LENGTHS = (1, 64, 65, 300, 1024, 1025, 130)  # tokens of sequences that decode together: of one split of keys, and two
PAGE = 64

Random = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """Some of a sequence's rows, [first, first + length) of all, that are computed next."""

    first: int
    length: int
    start: int  # position in its sequence
    slot: int


def steps(cut: int) -> Iterator[tuple[Piece, ...]]:
    """A sequence in two pieces, the second one behind another sequence."""
    yield (Piece(0, cut, 0, 0),)
    yield Piece(LENGTH, COMPANY, 0, 1), Piece(cut, LENGTH - cut, cut, 0)


def batch_of(pieces: tuple[Piece, ...], tables: list[torch.Tensor], position_B: torch.Tensor) -> StepBatch:
    """A step of these pieces, whose pages are by slot, or of decoding sequences (slots in order)."""
    slices, first = [], 0
    for piece in pieces:
        slices.append(Slice(first, piece.length, piece.start, piece.slot, tables[piece.slot], 0))
        first += piece.length
    slot_B = torch.arange(len(position_B), device=position_B.device)
    position_N = torch.cat([position_B.new_empty(first), position_B])
    decoding = tuple(tables[: len(position_B)])
    return StepBatch(position_N, position_N, tuple(slices), slot_B, decoding, slot_B)


def broken_recurrence(layer: Layer, mixer: RecurrentMixer[Any], random: Random, device: str) -> Iterator[str]:
    """The mixer's kernels and its convolution's."""
    n_rows = LENGTH + COMPANY
    positions = torch.arange(n_rows, device=device)
    rows = mixer.project(random(n_rows, layer.hidden).float(), batch_of((), [], positions[:0]))
    shapes = dict(layer.states)
    before = {name: random(max(SEQUENCES), *shape).float() for name, shape in shapes.items()}
    tables = [positions[:0]] * max(SEQUENCES)

    def prefill(*in_turn: tuple[Piece, ...]) -> tuple[torch.Tensor, ...]:
        """What the last piece of each step reads, and its sequence's states after all of them."""
        state = _state(before)
        reads = []
        for pieces in in_turn:
            at = torch.cat([positions[p.first : p.first + p.length] for p in pieces])
            ragged = batch_of(pieces, tables, positions[:0]).rounds[0].ragged
            read = mixer.gpu.prefill(rows.mixed_NC[at], rows.gates_NX[at], ragged, state.recurrent, state.conv)
            reads.append(read[-pieces[-1].length :])
        return torch.cat(reads), *(t[0] for t in (state.recurrent, state.conv) if t is not None)

    def decode(at: slice) -> tuple[torch.Tensor, ...]:
        state = _state({name: t[at] for name, t in before.items()})
        batch = batch_of((), tables, positions[at])
        read = mixer.gpu.decode(rows.mixed_NC[at], rows.gates_NX[at], batch, state.recurrent, state.conv)
        return read, *(t for t in (state.recurrent, state.conv) if t is not None)

    whole = prefill((Piece(0, LENGTH, 0, 0),))
    for cut in CUTS:
        if not _same(prefill(*steps(cut)), whole):
            yield f"{layer.kind} cut at {cut} tokens, in company"
    yield from (f"{layer.kind} at {n} decoding sequences" for n in _broken_counts(decode))


def broken_attention(shape: tuple[int, int, int], random: Random, device: str) -> Iterator[str]:
    """Paged attention; `shape` is KV heads, query heads that share one, and channels."""
    from headwater.mixers.attention import gpu

    n_kv, sharing, width = shape
    tables, position_B = _paged(device)
    n_pages = sum(len(table) for table in tables)
    keys_values = (random(n_pages, PAGE * n_kv * width), random(n_pages, PAGE * n_kv * width))
    q_NHD = random(LENGTH + COMPANY, n_kv * sharing, width)

    def prefill(*in_turn: tuple[Piece, ...]) -> torch.Tensor:
        reads = []
        for pieces in in_turn:
            q_PHD = torch.cat([q_NHD[p.first : p.first + p.length] for p in pieces])
            step = gpu.PagedStep.of(batch_of(pieces, tables, position_B[:0]), PAGE)
            reads.append(gpu.prefill(q_PHD, keys_values, step, PAGE, width**-0.5)[-pieces[-1].length :])
        return torch.cat(reads)

    def decode(at: slice) -> tuple[torch.Tensor, ...]:
        return (gpu.decode(q_NHD[at], keys_values, _decoding(tables[at], position_B[at]), PAGE, width**-0.5),)

    whole = prefill((Piece(0, LENGTH, 0, 0),))
    for cut in CUTS:
        if not torch.equal(prefill(*steps(cut)), whole):
            yield f"attention cut at {cut} tokens, in company"
    yield from (f"attention at {n} decoding sequences" for n in _broken_counts(decode))


def broken_latent_attention(layer: LatentAttention, random: Random, device: str) -> Iterator[str]:
    """Decode among latents."""
    from headwater.mixers.mla import gpu

    (width,) = layer.kv_widths
    tables, position_B = _paged(device)
    pages = random(sum(len(table) for table in tables), PAGE * width)
    q_BHX, scale = random(len(LENGTHS), layer.heads, width), layer.key_dim**-0.5

    def decode(at: slice) -> tuple[torch.Tensor, ...]:
        return (gpu.decode(q_BHX[at], pages, _decoding(tables[at], position_B[at]), PAGE, scale, layer.latent),)

    yield from (f"{layer.kind} at {n} decoding sequences" for n in _broken_counts(decode))


def broken_experts(layer: Experts, random: Random, device: str) -> Iterator[str]:
    """A product of decoding rows, each with a weight of its own; two weights do for all."""
    from headwater.mixers.gpu.experts import routed_product

    expert = layer.expert
    x_RK, weight_ENK = random(max(SEQUENCES), expert.hidden), random(2, expert.intermediate, expert.hidden)
    expert_R = torch.arange(len(x_RK), device=device) % 2

    def decode(at: slice) -> tuple[torch.Tensor, ...]:
        return (routed_product(x_RK[at], weight_ENK, expert_R[at]),)

    yield from (f"{layer.kind} at {n} decoding sequences" for n in _broken_counts(decode))


def _paged(device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Page tables of decoding sequences, each long enough for any, and their last positions."""
    longest = -(-max(*LENGTHS, LENGTH) // PAGE)
    tables = torch.arange(len(LENGTHS) * longest, device=device).view(len(LENGTHS), longest)
    return list(tables), torch.tensor(LENGTHS, device=device) - 1


def _decoding(tables: list[torch.Tensor], position_B: torch.Tensor) -> Decoding:
    """Tables as long as the longest of these sequences asks for: splits are as many as they are in this company."""
    from headwater.mixers.attention.gpu import PagedStep

    n_pages = int(position_B.max()) // PAGE + 1
    return PagedStep.of(batch_of((), [table[:n_pages] for table in tables], position_B), PAGE)


def _state(rows: dict[str, torch.Tensor]) -> LayerState:
    return LayerState(rows["recurrent"].clone(), rows["conv"].clone() if "conv" in rows else None)


def _broken_counts(decode: Callable[[slice], tuple[torch.Tensor, ...]]) -> Iterator[int]:
    """How many sequences are too few, or too many, for the bits that they have all together."""
    n = max(SEQUENCES)
    whole = decode(slice(0, n))
    for count in SEQUENCES:
        for at in (slice(0, count), slice(n - count, n)):
            if not _same(decode(at), tuple(of[at] for of in whole)):
                yield count


def _same(some: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
