"""Segments as a server composes them: each was computed from a start of zeros, as if it stood alone.

What comes after them takes the state that they lead to, one after the other, and attends to all of them. So a model can
learn to say the same whether its documents have seen each other or not (`docs/segments.md`).

B sequences, T tokens of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

SEAMS = (8, 16, 32)  # tokens at a segment's end that see everything before them, as those after it do
FORGET = -30.0  # added to the logarithm of a decay: nothing is left of the state before


@dataclass(frozen=True)
class Marks:
    """The ids that tell where segments begin and end."""

    separator: int
    ends: frozenset[int]  # what no segment reaches across: marks of turns


def first_seen(ids: list[int], marks: Marks, seam: int) -> np.ndarray:
    """For each token the first position that it sees [T]: of a segment's its beginning, of all others 0.

    A segment goes from one separator to the next. Its last `seam` tokens see all, and all of it where it has not more
    than twice as many tokens.
    """
    seen_T = np.zeros(len(ids), dtype=np.int64)
    begin = -1
    for at, token in enumerate(ids):
        if token in marks.ends:
            begin = -1
        elif token == marks.separator:
            if begin > 0 and at - begin > 2 * seam:
                seen_T[begin : at - seam] = begin
            begin = at
    return seen_T


class Apart:
    """Tokens of a batch that see only their segment, in the shapes that layers take.

    `seen_BT` [B, T] is of `first_seen`.
    """

    def __init__(self, seen_BT: torch.Tensor) -> None:
        at_T = torch.arange(seen_BT.shape[1], device=seen_BT.device)
        self.alone_BT = seen_BT > 0
        begins_BT = self.alone_BT & (seen_BT == at_T)
        self.forget_BT1 = begins_BT[..., None] * FORGET
        self.begins = begins_BT.nonzero(as_tuple=True)
        self.allowed_B1TT = ((at_T <= at_T[:, None]) & (at_T >= seen_BT[..., None]))[:, None]

    def first(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indices of the first `tokens` tokens of each segment: two tensors [segments, tokens]."""
        row_S, at_S = self.begins
        at_St = at_S[:, None] + torch.arange(tokens, device=at_S.device)
        return row_S[:, None].expand_as(at_St), at_St
