"""Sampling: logits to tokens, greedy, or drawn after temperature, top-k, top-p and min-p; prompts' log probabilities.

R: rows of a step or of one leg. V: tokens of the vocabulary. K: tokens that a filter has left, or the most likely ones.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headwater.engine.constraint import ConstraintMachine
from headwater.engine.passes import passes
from headwater.engine.penalties import Penalties
from headwater.errors import ConstraintError, InvalidLogits
from headwater.events import PromptEvent, TokenEvent, TokenLogprob
from headwater.mixers.gpu import has_kernels
from headwater.request import SamplingParams

COLDEST = 1e-6  # temperatures below are this one: float32 could not tell them apart, and 0 would divide 0
FIRST_GUESS = 256  # tokens among which top-p looks first
WORD = 2**64 - 1
SCORED_AT_ONCE = 32  # rows, so that log probabilities of long prompts take little memory


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, its log-probability under the unmodified logits if asked for, and the most likely ones."""

    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class Sampling:
    """Sampling state of one request: parameters, seed, penalties, constraint and tokens that end the output.

    `take` advances it once for each appended token. A preempted request keeps its state, and replayed tokens do not
    advance it again. Without a seed it draws one.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        machine: ConstraintMachine | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        self.params, self.machine, self.ends = params, machine, tuple(ends)
        self._taken = 0  # tokens of the output
        self._seed = secrets.randbits(64) if params.seed is None else params.seed
        self._prompt = prompt
        self._penalties: Penalties | None = None  # created with the first token: waiting requests need no memory for it
        self._penalised = Penalties.wanted(params)

    @property
    def adjusts(self) -> bool:
        """True if tokens are sampled from logits other than the model's."""
        return self._penalised or self.machine is not None or self._too_short

    @property
    def uniform(self) -> float:
        """Number in [0, 1) by which the next token is drawn: the same whenever and with whatever else it is drawn."""
        return uniform(self._seed, self.params.choice, self._taken)

    @property
    def _too_short(self) -> bool:
        """True if no token may end the output yet."""
        return self._taken < self.params.min_tokens and bool(self.ends)

    @property
    def finished(self) -> bool:
        """True if the constraint allows no further token."""
        return self.machine is not None and self.machine.finished

    def adjusted(self, logits_V: torch.Tensor) -> torch.Tensor:
        """The logits after penalties, bias and constraint, in this order. Raises ConstraintError."""
        penalties = self._with_penalties()
        if penalties is not None:
            logits_V = penalties.apply(logits_V)
        allowed_V = None if self.machine is None else self.machine.allowed()
        if self._too_short:
            allowed_V = self._without_ends(allowed_V, len(logits_V))
        return logits_V if allowed_V is None else logits_V.masked_fill(~allowed_V, -torch.inf)

    def _with_penalties(self) -> Penalties | None:
        """Return the penalties, which are made when they are first needed; None if there are none."""
        if self._penalties is None and self._penalised:
            self._penalties = Penalties(self.params, self._prompt)
        return self._penalties

    def _without_ends(self, allowed_V: torch.Tensor | None, vocab_size: int) -> torch.Tensor | None:
        """Disallow the tokens that end the output, unless nothing else may follow: a complete constraint ends it."""
        others_V = torch.ones(vocab_size, dtype=torch.bool) if allowed_V is None else allowed_V.clone()
        others_V[[token for token in self.ends if token < vocab_size]] = False
        return others_V if bool(others_V.any()) else allowed_V

    def take(self, token: int) -> None:
        """`token` was chosen and appended. Raises ConstraintError if the constraint cannot go on within its limits."""
        self._taken += 1
        penalties = self._with_penalties()
        if penalties is not None:
            penalties.take(token)
        if self.machine is not None:
            self.machine.take(token)


@dataclass(eq=False)
class Row:
    """A row of a step on its way to a choice: the logits that it is chosen from, and the largest of them."""

    sampling: Sampling
    at: int  # among the step's rows
    logits_V: torch.Tensor | None  # None: its largest one is the choice
    largest: float
    token: int  # the first whose logit is the largest
    error: InvalidLogits | ConstraintError | None = None

    @property
    def draws(self) -> bool:
        """True if the token is still to be drawn, from its logits."""
        return self.logits_V is not None and self.sampling.params.temperature > 0

    def check(self, what: str) -> None:
        """Note if the largest logit is not finite; it is NaN if any is."""
        if not math.isfinite(self.largest):
            self.error = InvalidLogits(f"{what} have {self.largest} as their largest: nothing can be sampled from them")


class StepLogits:
    """Logits of a step's rows, float32 [R, V], which are left as they are; the largest of each is found in one pass."""

    def __init__(self, logits_RV: torch.Tensor) -> None:
        self._logits_RV = logits_RV
        self._largest_R, self._first_R = passes().largest(logits_RV)

    @classmethod
    def of(cls, logits_RV: torch.Tensor) -> StepLogits:
        """Return the logits of a step, from which tokens are chosen where they are."""
        if not has_kernels(logits_RV.device):
            return cls(logits_RV)
        from headwater.engine.sampler_on_gpu import LogitsOnGpu  # needs Triton

        return LogitsOnGpu(logits_RV)

    def rows(self, at: Sequence[int]) -> torch.Tensor:
        """Return some rows, on the CPU; all of them, or none, without a copy."""
        return _some(self._logits_RV, at)

    def sample(
        self, at: Sequence[int], samplings: Sequence[Sampling]
    ) -> list[Choice | InvalidLogits | ConstraintError]:
        """One choice for each of some rows, or why there is none. A row depends on its own logits and sampling only.

        `at`: numbers of these rows, ascending. Greedy rows (temperature 0) take the first of equal maxima.
        Log-probabilities are those of the logits as the model gave them, before penalties, bias, constraint or
        temperature. A row whose largest logit is NaN or infinite gives InvalidLogits.
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
        """Return the logits that rows are drawn from: without a copy if they are all of the step's, as they are."""
        if len(drawing) == len(self._logits_RV) and not any(row.sampling.adjusts for row in drawing):
            return self._logits_RV
        return torch.stack(_logits(drawing))


def _choice(token: int, score: Score | None) -> Choice:
    return Choice(token) if score is None else Choice(token, score.logprob, score.top)


def _logits(rows: Sequence[Row]) -> list[torch.Tensor]:
    return [row.logits_V for row in rows if row.logits_V is not None]


def sample(logits_RV: torch.Tensor, samplings: Sequence[Sampling]) -> list[Choice | InvalidLogits | ConstraintError]:
    """One choice for each row of a step, as `StepLogits.sample` gives it."""
    return StepLogits(logits_RV).sample(range(len(logits_RV)), samplings)


def _adjust(rows: Sequence[Row]) -> None:
    """Apply penalties, bias and constraints, or note why that failed."""
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
    """Set the token of each row, which is drawn from its logits."""
    params, uniform_R = [row.sampling.params for row in rows], [row.sampling.uniform for row in rows]
    tokens = _draw(logits_RV, [row.largest for row in rows], params, uniform_R)
    for row, token in zip(rows, tokens, strict=True):
        row.token = token


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the random number in [0, 1) of an answer's token: a function of its arguments, without a state.

    `choice`: number of the answer among those to one prompt; `position`: tokens of the answer before it. By ten rounds
    of Philox4x64, a generator that is indexed by a counter (Salmon et al. 2011, "Parallel random numbers: as easy as
    1, 2, 3"), with the bits of numpy's, whose objects take three times as long to make.
    """
    a, b, c, d = position + 1, 0, 0, 0
    k, m = seed & WORD, choice
    for _ in range(10):
        p, q = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (q >> 64) ^ b ^ k, q & WORD, (p >> 64) ^ d ^ m, p & WORD
        k, m = (k + 0x9E3779B97F4A7C15) & WORD, (m + 0xBB67AE8584CAA73B) & WORD
    return (a >> 11) * 2.0**-53


def draw(logits_V: torch.Tensor, p: SamplingParams, uniform: float) -> int:
    """One token from the distribution that is left after temperature, top-k, top-p and min-p, in this order."""
    largest_R, _ = passes().largest(logits_V[None])
    return _draw(logits_V[None], largest_R, [p], [uniform])[0]


def _draw(
    logits_RV: torch.Tensor,
    largest_R: Sequence[float],
    params: Sequence[SamplingParams],
    uniform_R: Sequence[float],
) -> list[int]:
    """Draw a token of each row. The softmax is torch's: a seed's token depends on its bits."""
    scaled_RV = passes().scaled(logits_RV, largest_R, [max(p.temperature, COLDEST) for p in params])
    probs_RV = torch.softmax(scaled_RV, dim=-1)
    filtered = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1]
    whole = [i for i, p in enumerate(params) if not (p.top_k or p.top_p < 1)]
    tokens = dict(zip(whole, _picked(_some(probs_RV, whole), whole, params, uniform_R), strict=True))
    left = _most_likely_of(_some(probs_RV, filtered), [params[i] for i in filtered])
    for i, (probs_K, token_K) in zip(filtered, left, strict=True):
        (at,) = _picked(probs_K[None], [i], params, uniform_R)
        tokens[i] = int(token_K[at])
    return [tokens[i] for i in range(len(params))]


def _some(x_RV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows; all of them, or none, without a copy: indexing takes torch 0.1 ms."""
    return x_RV if len(rows) == len(x_RV) else x_RV[rows] if rows else x_RV[:0]


def _picked(
    probs_IK: torch.Tensor, rows: Sequence[int], params: Sequence[SamplingParams], uniform_R: Sequence[float]
) -> list[int]:
    """Return an index for each of these rows, of probabilities from min_p of the largest one on."""
    if not rows:
        return []
    least_I = [
        float(params[i].min_p * probs_K.amax()) if params[i].min_p else 0.0
        for i, probs_K in zip(rows, probs_IK, strict=True)
    ]
    return passes().drawn(probs_IK, least_I, [uniform_R[i] for i in rows])


def _most_likely(probs_V: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and ids of the top_k tokens, and of these the fewest that have top_p of their sum; descending."""
    return _most_likely_of(probs_V[None], [SamplingParams(top_k=top_k, top_p=top_p)])[0]


def _most_likely_of(
    probs_RV: torch.Tensor, params: Sequence[SamplingParams]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return these of each row. Rows are sorted if top-p may take more tokens than those looked at first."""
    size = probs_RV.shape[1]
    left = [_leading(probs_V, p.top_k, p.top_p) for probs_V, p in zip(probs_RV, params, strict=True)]
    more = [i for i, p in enumerate(params) if not p.top_k and len(left[i][0]) == FIRST_GUESS < size]
    if more:
        # all tokens less likely than this together have less than 1 - top_p
        least_R = [0.5 * (1 - params[i].top_p) / size for i in more]
        for i, (probs_K, token_K) in zip(more, passes().descending(_some(probs_RV, more), least_R), strict=True):
            keep = _reaching(probs_K, params[i].top_p)
            left[i] = probs_K[:keep], token_K[:keep]
    return left


def _leading(probs_V: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that top-k and top-p leave among the top_k, or among as many as top-p looks at first."""
    probs_K, token_K = passes().leading(probs_V, min(top_k or FIRST_GUESS, len(probs_V)))
    if top_p == 1:
        return probs_K, token_K
    keep = _reaching(probs_K, top_p * float(probs_K.sum(dtype=torch.float64)) if top_k else top_p)
    return probs_K[:keep], token_K[:keep]


def _reaching(probs_K: torch.Tensor, total: float) -> int:
    """Return the least number of leading entries, at least 1, that sum to `total`; all if they sum to less."""
    before_K = probs_K.cumsum(0, dtype=torch.float64) - probs_K
    return max(1, int((before_K < total).sum()))


@dataclass(frozen=True, slots=True)
class Score:
    """A token's log probability and rank (1: the most likely), and the most likely tokens."""

    logprob: float
    rank: int
    top: tuple[TokenLogprob, ...]


def logprobs_of(logits_RV: torch.Tensor, token_R: Sequence[int], k_R: Sequence[int]) -> list[Score]:
    """Return the score of a token after each row, with the row's k most likely ones."""
    scores = []
    for start in range(0, len(logits_RV), SCORED_AT_ONCE):
        rows = slice(start, start + SCORED_AT_ONCE)
        logprobs_RV = torch.log_softmax(logits_RV[rows], dim=-1)
        own_R = logprobs_RV.gather(1, torch.tensor(token_R[rows], dtype=torch.int64)[:, None])[:, 0]
        columns = own_R.tolist(), passes().n_larger(logprobs_RV, own_R), logprobs_RV, k_R[rows]
        scores += [Score(own, n + 1, _top(logprobs_V, k)) for own, n, logprobs_V, k in zip(*columns, strict=True)]
    return scores


def _top(logprobs_V: torch.Tensor, k: int) -> tuple[TokenLogprob, ...]:
    if k == 0:
        return ()
    values_K, token_K = passes().leading(logprobs_V, min(k, len(logprobs_V)))
    return tuple(map(TokenLogprob, token_K.tolist(), values_K.tolist()))


class PromptScores:
    """Log probabilities of one request's prompt."""

    def __init__(self, prompt: Sequence[int], k: int) -> None:
        self._prompt, self._k = prompt, k
        self._tokens = [TokenEvent(prompt[0], "")]

    @classmethod
    def wanted(cls, prompt: Sequence[int], params: SamplingParams) -> PromptScores | None:
        return None if params.prompt_logprobs is None else cls(prompt, params.prompt_logprobs)

    def take(self, start: int, logits_RV: torch.Tensor) -> None:
        """Add logits of positions from `start` on, each for the token after it; they replace earlier ones.

        Raises InvalidLogits for rows without a finite largest logit.
        """
        largest_R, _ = passes().largest(logits_RV)
        for at, largest in enumerate(largest_R, start):
            if not math.isfinite(largest):
                raise InvalidLogits(f"the logits after the prompt's token {at:,} have {largest} as their largest")
        next_R = self._prompt[start + 1 : start + 1 + len(logits_RV)]
        scores = logprobs_of(logits_RV, next_R, [self._k] * len(next_R))
        self._tokens[start + 1 :] = [
            TokenEvent(token, "", score.logprob, score.top, score.rank)
            for token, score in zip(next_R, scores, strict=True)
        ]

    def event(self) -> PromptEvent:
        """Return the event, once all legs have been added."""
        return PromptEvent(tuple(self._tokens))
