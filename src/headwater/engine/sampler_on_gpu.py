"""Sampling on a GPU: tokens are chosen beside the logits; only rows that a request adjusts or scores are copied.

R rows of a step, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.engine.sampler import COLDEST, Row, Sampling, StepLogits
from headwater.mixers.gpu.sampling import Draw, choose


class LogitsOnGpu(StepLogits):
    """Logits of a step's rows on a GPU, float32 [R, V].

    Draws follow the rules of the CPU's, with other sums: a seed's tokens are others here. Rows that penalties, bias or
    a constraint adjust are drawn on the CPU.
    """

    def __init__(self, logits_RV: torch.Tensor) -> None:
        self._logits_RV = logits_RV
        self._copied: dict[int, torch.Tensor] = {}

    def rows(self, at: Sequence[int]) -> torch.Tensor:
        if not at:
            return torch.empty(0, self._logits_RV.shape[1])
        missing = [row for row in at if row not in self._copied]
        if missing:
            self._copied |= zip(missing, self._logits_RV[missing].cpu(), strict=True)
        return torch.stack([self._copied[row] for row in at])

    def _rows(self, at: Sequence[int], samplings: Sequence[Sampling]) -> list[Row]:
        asked = list(zip(at, samplings, strict=True))
        adjusted = [row for row, sampling in asked if sampling.adjusts]
        logits = dict(zip(adjusted, self.rows(adjusted), strict=True))
        found = choose(self._logits_RV, [_draw(row, sampling) for row, sampling in asked])
        return [
            Row(sampling, row, logits.get(row), largest, token)
            for (row, sampling), largest, token in zip(asked, *found, strict=True)
        ]


def _draw(row: int, sampling: Sampling) -> Draw:
    """Return how a row's token is chosen, before anything is adjusted."""
    p = sampling.params
    if p.temperature == 0 or sampling.adjusts:
        return Draw(row)
    return Draw(row, max(p.temperature, COLDEST), p.top_k, p.top_p, p.min_p, sampling.uniform)
