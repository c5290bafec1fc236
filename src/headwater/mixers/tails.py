"""Prompts that continue in mid-page: layers with a state compute the tokens since the last checkpoint again.

A chunked recurrence has no state in the middle of a chunk. So a tail keeps what the products with weights give to the
recurrence for each token after a checkpoint; from these inputs the open chunk is computed to the same bits, without
products. Layers compute a step with such rows in front of the own rows of each slice, and drop their outputs.

N rows of a step, W rows of a step with kept rows, R rows of the tail memory, T tokens of a tail, X any trailing
dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from headwater.mixers.batch import StepBatch
from headwater.mixers.slices import Keep, Slice

Products = tuple[Tensor, ...]


class State(Protocol):
    """State memory of a layer."""

    @property
    def tail(self) -> Tensor | None:
        """Rows of the tail memory, [R, T, X]."""


Of = TypeVar("Of", bound=State, contravariant=True)


class Recurrence(Protocol[Of]):
    """The part of a layer between its two projections."""

    def without_gate(self, products: Products) -> Products:
        """Return views of all columns of the products that the state depends on: a tail keeps these."""

    def outputs(self, products: Products, batch: StepBatch, state: Of) -> Tensor:
        """Return the inputs of the last projection of all rows of a step; update states."""


@dataclass(frozen=True)
class WithKept:
    """A step's rows, with the kept rows of tails in front of the own rows of each slice."""

    batch: StepBatch  # of all these rows, for layers with a state; without tokens
    own: tuple[tuple[slice, slice], ...]  # the step's own rows among these, and their numbers in the step
    kept: tuple[tuple[slice, int], ...]  # the other rows, and the row of the tail memory that has their inputs
    keeps: tuple[tuple[slice, int], ...]  # rows whose inputs are written to a row of the tail memory

    @classmethod
    def of(cls, batch: StepBatch) -> WithKept | None:
        """Return the rows of a step; None if it neither continues nor writes a tail."""
        if not any(s.kept or s.keeps for s in batch.slices):
            return None
        found: WithKept | None = batch.derived.get(cls)
        if found is None:
            found = batch.derived[cls] = cls._of(batch)
        return found

    @classmethod
    def _of(cls, batch: StepBatch) -> WithKept:
        slices, first = list[Slice](), 0
        own, kept, keeps = list[tuple[slice, slice]](), list[tuple[slice, int]](), list[tuple[slice, int]]()
        positions = list[Tensor]()
        for s in batch.slices:
            length = s.kept + s.length
            whole = replace(s, first=first, start=s.start - s.kept, length=length, kept=0, keeps=(), unread=s.kept)
            slices.append(whole)
            kept += [(slice(first, first + s.kept), s.tail)] if s.kept else []
            own.append((slice(first + s.kept, first + whole.length), slice(s.first, s.first + s.length)))
            keeps += [(rows_of(whole, keep), keep.row) for keep in s.keeps if keep.start < keep.end]
            positions.append(torch.arange(whole.start, whole.end, device=batch.position_N.device))
            first += whole.length
        own.append((slice(first, first + batch.n_decode), batch.decode_rows))
        positions.append(batch.position_N[batch.decode_rows])
        many = replace(batch, slices=tuple(slices), token_N=batch.token_N[:0], position_N=torch.cat(positions))
        return cls(many, tuple(own), tuple(kept), tuple(keeps))


def rows_of(s: Slice, keep: Keep) -> slice:
    """Return the rows of a slice, as computed by layers with a state, that have the tokens of a tail."""
    if not s.start <= keep.start <= keep.end <= s.end:
        raise ValueError(f"a tail of tokens {keep.start} to {keep.end} in a slice of {s.start} to {s.end}")
    return slice(s.first + keep.start - s.start, s.first + keep.end - s.start)


def outputs(layer: Recurrence[Of], products: Products, batch: StepBatch, state: Of) -> Tensor:
    """Return the inputs of a layer's last projection of a step's rows, after the kept rows of tails; update states.

    Write the tails that the step keeps.
    """
    whole = WithKept.of(batch)
    if whole is None:
        return layer.outputs(products, batch, state)
    assert state.tail is not None, "the step continues or writes tails, and has no memory of them"
    if whole.kept:
        products = _with_kept(layer, products, whole, state.tail)
    parts = layer.without_gate(products)
    for rows, row in whole.keeps:
        _joined_into(state.tail[row, : rows.stop - rows.start], [part[rows] for part in parts])
    if not whole.kept:
        return layer.outputs(products, batch, state)
    out_WX = layer.outputs(products, whole.batch, state)
    return torch.cat([out_WX[rows] for rows, _ in whole.own])


def _with_kept(layer: Recurrence[Any], products: Products, whole: WithKept, tail_RTX: Tensor) -> Products:
    """Return the products of all rows; those of the output's gate are zeros in kept rows, whose outputs are dropped."""
    n = whole.own[-1][0].stop
    found = tuple(product_NX.new_empty(n, *product_NX.shape[1:]) for product_NX in products)
    for all_WX, product_NX in zip(found, products, strict=True):
        for rows, source in whole.own:
            all_WX[rows] = product_NX[source]
        for rows, _ in whole.kept:
            all_WX[rows] = 0
    for rows, row in whole.kept:
        parts = [part[rows] for part in layer.without_gate(found)]
        for part, kept in zip(parts, _split(tail_RTX[row, : rows.stop - rows.start], parts), strict=True):
            part.copy_(kept)
    return found


def _split(kept_TX: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = kept_TX.split([part.shape[-1] for part in like], -1)
    return parts


def _joined_into(out_TX: Tensor, parts: Sequence[Tensor]) -> None:
    for to, part in zip(_split(out_TX, parts), parts, strict=True):
        to.copy_(part)
