"""Tokens of a step, chosen from the logits of its rows on the CPU or on a GPU.

R: rows of a step. V: tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headwater.engine.passes import passes
from headwater.engine.sampler import MIN_TEMPERATURE, Choice, Sampling, Score, draw_rows, logprobs_of, some_rows
from headwater.errors import ConstraintError, InvalidLogits
from headwater.mixers.gpu import has_kernels


@dataclass(eq=False)
class Row:
    """A row of a step and its choice so far: the logits to choose from, and the largest of them."""

    sampling: Sampling
    at: int  # index among the step's rows
    logits_V: torch.Tensor | None  # None: the token with the largest logit is the choice
    largest: float
    token: int  # the first token with the largest logit
    error: InvalidLogits | ConstraintError | None = None

    @property
    def draws(self) -> bool:
        """True if the token must be drawn from the logits."""
        return self.logits_V is not None and self.sampling.params.temperature > 0

    def check(self, subject: str) -> None:
        """Set `error` if the largest logit is not finite; it is NaN if any logit is."""
        if not math.isfinite(self.largest):
            self.error = InvalidLogits(f"{subject} have {self.largest} as their largest: no token can be sampled")


class StepLogits:
    """Logits of a step's rows, float32 [R, V], never modified; one pass finds the largest logit of each row."""

    def __init__(self, logits_RV: torch.Tensor) -> None:
        self._logits_RV = logits_RV
        self._largest_R, self._first_R = passes().largest(logits_RV)

    @classmethod
    def of(cls, logits_RV: torch.Tensor) -> StepLogits:
        """Wrap the logits of a step for the device that holds them."""
        return LogitsOnGpu(logits_RV) if has_kernels(logits_RV.device) else cls(logits_RV)

    def rows(self, at: Sequence[int]) -> torch.Tensor:
        """Return some rows, on the CPU; all of them, or none, without a copy."""
        return some_rows(self._logits_RV, at)

    def sample(
        self, at: Sequence[int], samplings: Sequence[Sampling]
    ) -> list[Choice | InvalidLogits | ConstraintError]:
        """Return a choice or an error for each of the rows `at`, ascending. Rows are independent of each other.

        Greedy rows (temperature 0) choose the first of equal maxima. Log-probabilities are those of the model's
        logits, before penalties, bias, constraint or temperature. A row whose largest logit is NaN or infinite
        gives InvalidLogits.
        """
        rows = self._rows(at, samplings)
        for row in rows:
            row.check("the model's logits")
        _adjust([row for row in rows if row.error is None and row.sampling.adjusts])
        drawing = [row for row in rows if row.error is None and row.draws]
        if drawing:
            _draw_into(drawing, self._logits_of(drawing))
        scored = [row for row in rows if row.error is None and row.sampling.params.logprobs is not None]
        tops = [row.sampling.params.logprobs or 0 for row in scored]
        scores = logprobs_of(self.rows([row.at for row in scored]), [row.token for row in scored], tops)
        of_row = dict(zip((row.at for row in scored), scores, strict=True))
        return [row.error or _choice(row.token, of_row.get(row.at)) for row in rows]

    def _rows(self, at: Sequence[int], samplings: Sequence[Sampling]) -> list[Row]:
        return [self._row(*row) for row in zip(at, samplings, strict=True)]

    def _row(self, at: int, sampling: Sampling) -> Row:
        needs_logits = sampling.adjusts or sampling.params.temperature > 0
        logits_V = self._logits_RV[at] if needs_logits else None
        return Row(sampling, at, logits_V, self._largest_R[at], self._first_R[at])

    def _logits_of(self, drawing: Sequence[Row]) -> torch.Tensor:
        """Return the logits to draw from: without a copy if these are all rows of the step, unadjusted."""
        if len(drawing) == len(self._logits_RV) and not any(row.sampling.adjusts for row in drawing):
            return self._logits_RV
        return torch.stack(_logits(drawing))


class LogitsOnGpu(StepLogits):
    """Logits of a step's rows on a GPU, float32 [R, V].

    Draws follow the same rules as on the CPU, with sums in another order: one seed gives other tokens here. Rows that
    penalties, bias or a constraint adjust are drawn on the CPU.
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
        from headwater.mixers.gpu.sampling import Draw, choose  # needs Triton

        asked = list(zip(at, samplings, strict=True))
        adjusted = [row for row, sampling in asked if sampling.adjusts]
        logits = dict(zip(adjusted, self.rows(adjusted), strict=True))
        found = choose(self._logits_RV, [Draw(row, *_filters(sampling)) for row, sampling in asked])
        return [
            Row(sampling, row, logits.get(row), largest, token)
            for (row, sampling), largest, token in zip(asked, *found, strict=True)
        ]


def _filters(sampling: Sampling) -> tuple[()] | tuple[float, int, float, float, float]:
    """Return the filters and the number by which a token is drawn; none if it is greedy or chosen on the CPU."""
    p = sampling.params
    if p.temperature == 0 or sampling.adjusts:
        return ()
    return max(p.temperature, MIN_TEMPERATURE), p.top_k, p.top_p, p.min_p, sampling.uniform


def _choice(token: int, score: Score | None) -> Choice:
    return Choice(token) if score is None else Choice(token, score.logprob, score.top)


def _logits(rows: Sequence[Row]) -> list[torch.Tensor]:
    return [row.logits_V for row in rows if row.logits_V is not None]


def sample(logits_RV: torch.Tensor, samplings: Sequence[Sampling]) -> list[Choice | InvalidLogits | ConstraintError]:
    """Return a choice or an error for each row of a step, as `StepLogits.sample` does."""
    return StepLogits(logits_RV).sample(range(len(logits_RV)), samplings)


def _adjust(rows: Sequence[Row]) -> None:
    """Apply penalties, bias and constraints; set `error` of rows for which that fails."""
    for row, logits_V in zip(rows, _logits(rows), strict=True):
        try:
            row.logits_V = row.sampling.adjusted(logits_V)
        except ConstraintError as error:
            row.error = error
    rows = [row for row in rows if row.error is None]
    if rows:
        largest_R, first_R = passes().largest(torch.stack(_logits(rows)))
        for row, largest, first in zip(rows, largest_R, first_R, strict=True):
            row.largest, row.token = largest, first
            row.check("after penalties, bias and constraint the logits")


def _draw_into(rows: Sequence[Row], logits_RV: torch.Tensor) -> None:
    """Draw the token of each row from its logits."""
    params, uniform_R = [row.sampling.params for row in rows], [row.sampling.uniform for row in rows]
    tokens = draw_rows(logits_RV, [row.largest for row in rows], params, uniform_R)
    for row, token in zip(rows, tokens, strict=True):
        row.token = token
