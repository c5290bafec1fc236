"""Sampling state of a request, draws of tokens after temperature, top-k, top-p and min-p, and log probabilities.

R: rows of a step or of one leg. V: tokens of the vocabulary. K: tokens that a filter leaves, the most likely ones, or
those whose logits penalties and bias change, with spare entries for more.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headwater.engine.constraint import ConstraintMachine
from headwater.engine.passes import passes
from headwater.errors import InvalidLogits
from headwater.events import PromptEvent, TokenEvent, TokenLogprob
from headwater.request import SamplingParams

MIN_TEMPERATURE = 1e-6  # replaces lower ones, which float32 cannot tell apart; 0 would divide 0
TOP_P_TOKENS = 256  # most likely tokens that top-p examines first
WORD = 2**64 - 1
SCORED_ROWS = 32  # at a time, to bound the memory for log probabilities of long prompts


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, its log-probability under the unmodified logits if asked for, and the most likely ones."""

    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class Penalties:
    """Repetition, presence and frequency penalty and logit bias of one request; O(1) work a generated token.

    Repetition (Keskar et al. 2019, section 4.1) applies to tokens of the prompt and of the output: a positive logit is
    divided by it, a negative one multiplied. Presence and frequency apply only to the output and are subtracted; the
    bias is added last, so that no penalty scales it. Memory and work grow with the penalised or biased tokens.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._params = params
        self._bias = dict(params.logit_bias)
        self._count: Counter[int] = Counter()  # of the output
        repeated = dict.fromkeys(prompt) if params.repetition_penalty != 1 else {}
        tokens = list(repeated | self._bias)
        self._at = {token: at for at, token in enumerate(tokens)}  # index in K
        self._token_K = torch.tensor(tokens, dtype=torch.int64)
        self._added_K = torch.tensor([self._bias.get(token, 0.0) for token in tokens])
        self._factor_K = torch.tensor([params.repetition_penalty if token in repeated else 1.0 for token in tokens])

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        """Return whether these parameters change any logit."""
        off = params.repetition_penalty == 1 and params.presence_penalty == 0 and params.frequency_penalty == 0
        return bool(params.logit_bias) or not off

    def take(self, token: int) -> None:
        """Record that `token` was appended to the output."""
        p = self._params
        self._count[token] += 1
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._token_K):
            self._double()
        self._token_K[at] = token
        penalty = p.presence_penalty + p.frequency_penalty * self._count[token]
        self._added_K[at] = self._bias.get(token, 0.0) - penalty
        self._factor_K[at] = p.repetition_penalty

    def _double(self) -> None:
        """Double the capacity."""
        added = (0, max(16, len(self._token_K)))
        self._token_K, self._added_K, self._factor_K = (
            F.pad(part_K, added) for part_K in (self._token_K, self._added_K, self._factor_K)
        )

    def apply(self, logits_V: torch.Tensor) -> torch.Tensor:
        """Return the logits after penalties and bias, as a copy."""
        used = slice(len(self._at))
        token_K = self._token_K[used]
        logit_K = logits_V[token_K]
        if self._params.repetition_penalty != 1:
            factor_K = self._factor_K[used]
            logit_K = torch.where(logit_K > 0, logit_K / factor_K, logit_K * factor_K)
        out_V = logits_V.clone()
        out_V[token_K] = logit_K + self._added_K[used]
        return out_V


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
        """Number in [0, 1) by which the next token is drawn; it does not depend on other requests or on time."""
        return uniform(self._seed, self.params.choice, self._taken)

    @property
    def _too_short(self) -> bool:
        """True if the output is still below `min_tokens`."""
        return self._taken < self.params.min_tokens and bool(self.ends)

    @property
    def finished(self) -> bool:
        """True if the constraint allows no further token."""
        return self.machine is not None and self.machine.finished

    def adjusted(self, logits_V: torch.Tensor) -> torch.Tensor:
        """Return the logits after penalties, bias and constraint, in this order. Raises ConstraintError."""
        penalties = self._with_penalties()
        if penalties is not None:
            logits_V = penalties.apply(logits_V)
        allowed_V = None if self.machine is None else self.machine.allowed()
        if self._too_short:
            allowed_V = self._without_ends(allowed_V, len(logits_V))
        return logits_V if allowed_V is None else logits_V.masked_fill(~allowed_V, -torch.inf)

    def _with_penalties(self) -> Penalties | None:
        """Return the penalties, created on first use; None if the parameters set none."""
        if self._penalties is None and self._penalised:
            self._penalties = Penalties(self.params, self._prompt)
        return self._penalties

    def _without_ends(self, allowed_V: torch.Tensor | None, vocab_size: int) -> torch.Tensor | None:
        """Disallow the tokens that end the output, unless the constraint allows no other token."""
        others_V = torch.ones(vocab_size, dtype=torch.bool) if allowed_V is None else allowed_V.clone()
        others_V[[token for token in self.ends if token < vocab_size]] = False
        return others_V if bool(others_V.any()) else allowed_V

    def take(self, token: int) -> None:
        """Advance by the appended `token`. Raises ConstraintError if the constraint cannot continue."""
        self._taken += 1
        penalties = self._with_penalties()
        if penalties is not None:
            penalties.take(token)
        if self.machine is not None:
            self.machine.take(token)


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
    """Draw a token from the distribution after temperature, top-k, top-p and min-p, in this order."""
    largest_R, _ = passes().largest(logits_V[None])
    return draw_rows(logits_V[None], largest_R, [p], [uniform])[0]


def draw_rows(
    logits_RV: torch.Tensor, largest_R: Sequence[float], params: Sequence[SamplingParams], uniform_R: Sequence[float]
) -> list[int]:
    """Draw a token of each row. The softmax is torch's, since the tokens of a seed depend on its bits."""
    scaled_RV = passes().scaled(logits_RV, largest_R, [max(p.temperature, MIN_TEMPERATURE) for p in params])
    probs_RV = torch.softmax(scaled_RV, dim=-1)
    filtered = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1]
    whole = [i for i, p in enumerate(params) if not (p.top_k or p.top_p < 1)]
    tokens = dict(zip(whole, _picked(some_rows(probs_RV, whole), whole, params, uniform_R), strict=True))
    left = _most_likely_of(some_rows(probs_RV, filtered), [params[i] for i in filtered])
    for i, (probs_K, token_K) in zip(filtered, left, strict=True):
        (at,) = _picked(probs_K[None], [i], params, uniform_R)
        tokens[i] = int(token_K[at])
    return [tokens[i] for i in range(len(params))]


def some_rows(x_RV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows; all rows or none without a copy, since indexing takes 0.1 ms in torch."""
    return x_RV if len(rows) == len(x_RV) else x_RV[rows] if rows else x_RV[:0]


def _picked(
    probs_IK: torch.Tensor, rows: Sequence[int], params: Sequence[SamplingParams], uniform_R: Sequence[float]
) -> list[int]:
    """Draw an index for each of these rows among probabilities of at least min_p times the largest one."""
    if not rows:
        return []
    least_I = [
        float(params[i].min_p * probs_K.amax()) if params[i].min_p else 0.0
        for i, probs_K in zip(rows, probs_IK, strict=True)
    ]
    return passes().drawn(probs_IK, least_I, [uniform_R[i] for i in rows])


def _most_likely(probs_V: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities and ids of the fewest top_k tokens that have top_p of their sum, descending."""
    return _most_likely_of(probs_V[None], [SamplingParams(top_k=top_k, top_p=top_p)])[0]


def _most_likely_of(
    probs_RV: torch.Tensor, params: Sequence[SamplingParams]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return `_most_likely` of each row. A row is sorted if top-p may need more than the tokens examined first."""
    size = probs_RV.shape[1]
    left = [_leading(probs_V, p.top_k, p.top_p) for probs_V, p in zip(probs_RV, params, strict=True)]
    more = [i for i, p in enumerate(params) if not p.top_k and len(left[i][0]) == TOP_P_TOKENS < size]
    if more:
        # all tokens less likely than this together have less than 1 - top_p
        least_R = [0.5 * (1 - params[i].top_p) / size for i in more]
        for i, (probs_K, token_K) in zip(more, passes().descending(some_rows(probs_RV, more), least_R), strict=True):
            keep = _reaching(probs_K, params[i].top_p)
            left[i] = probs_K[:keep], token_K[:keep]
    return left


def _leading(probs_V: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that top-k and top-p leave among the top_k, or among those that top-p examines first."""
    probs_K, token_K = passes().leading(probs_V, min(top_k or TOP_P_TOKENS, len(probs_V)))
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
    """Return the score of a token after each row, with the k most likely tokens of the row."""
    scores = []
    for start in range(0, len(logits_RV), SCORED_ROWS):
        rows = slice(start, start + SCORED_ROWS)
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
