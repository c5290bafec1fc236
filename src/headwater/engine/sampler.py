"""Sampling: logits to tokens, greedy, or drawn after temperature, top-k, top-p and min-p; prompts' log probabilities.

R: rows of a step or of one leg. V: tokens of the vocabulary. K: tokens that a filter has left, or the most likely ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headwater.engine.constraint import ConstraintMachine
from headwater.errors import ConstraintError, InvalidLogits
from headwater.events import PromptEvent, TokenEvent, TokenLogprob
from headwater.request import SamplingParams

COLDEST = 1e-6  # temperatures below are this one: float32 could not tell them apart, and 0 would divide 0
FIRST_GUESS = 256  # tokens among which top-p looks first


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, its log-probability under the unmodified logits if asked for, and the most likely ones."""

    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class Penalties:
    """Repetition, presence and frequency penalty and logit bias of one request; O(1) work a generated token.

    Repetition (Keskar et al. 2019, section 4.1) holds for tokens of the prompt and of the output: a positive logit is
    divided by it, a negative one multiplied. Presence and frequency hold for the output alone and are subtracted; the
    bias is added last, so that no penalty scales it.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        self._params = params
        self._bias = dict(params.logit_bias)
        self._count: Counter[int] = Counter()  # of the output
        self._added_V = torch.zeros(vocab_size)
        for token, bias in self._bias.items():
            self._added_V[token] = bias
        self._factor_V = None
        if params.repetition_penalty != 1:
            self._factor_V = torch.ones(vocab_size)
            self._factor_V[torch.tensor(prompt, dtype=torch.int64)] = params.repetition_penalty

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        """Return whether these parameters change any logit."""
        off = params.repetition_penalty == 1 and params.presence_penalty == 0 and params.frequency_penalty == 0
        return bool(params.logit_bias) or not off

    def take(self, token: int) -> None:
        """`token` was appended to the output."""
        p = self._params
        self._count[token] += 1
        penalty = p.presence_penalty + p.frequency_penalty * self._count[token]
        self._added_V[token] = self._bias.get(token, 0.0) - penalty
        if self._factor_V is not None:
            self._factor_V[token] = p.repetition_penalty

    def apply(self, logits_V: torch.Tensor) -> torch.Tensor:
        """The logits after penalties and bias, in memory of their own."""
        if self._factor_V is not None:
            logits_V = torch.where(logits_V > 0, logits_V / self._factor_V, logits_V * self._factor_V)
        return logits_V + self._added_V


class Sampling:
    """Sampling state of one request: parameters, generator, penalties, constraint and tokens that end the output.

    `take` advances it once for each appended token. A preempted request keeps its state, and replayed tokens do not
    advance it again.
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
        self.generator: torch.Generator | None = None
        if params.temperature > 0:
            self.generator = torch.Generator()
            self.generator.seed() if params.seed is None else self.generator.manual_seed(params.seed)
        self._prompt = prompt
        self._penalties: Penalties | None = None  # created with the first token: waiting requests need no memory for it
        self._penalised = Penalties.wanted(params)

    @property
    def adjusts(self) -> bool:
        """True if tokens are sampled from logits other than the model's."""
        return self._penalised or self.machine is not None or self._too_short

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
        if self._penalised:
            if self._penalties is None:
                self._penalties = Penalties(self.params, self._prompt, len(logits_V))
            logits_V = self._penalties.apply(logits_V)
        allowed_V = None if self.machine is None else self.machine.allowed()
        if self._too_short:
            allowed_V = self._without_ends(allowed_V, len(logits_V))
        return logits_V if allowed_V is None else logits_V.masked_fill(~allowed_V, -torch.inf)

    def _without_ends(self, allowed_V: torch.Tensor | None, vocab_size: int) -> torch.Tensor | None:
        """Disallow the tokens that end the output, unless nothing else may follow: a complete constraint ends it."""
        others_V = torch.ones(vocab_size, dtype=torch.bool) if allowed_V is None else allowed_V.clone()
        others_V[[token for token in self.ends if token < vocab_size]] = False
        return others_V if bool(others_V.any()) else allowed_V

    def take(self, token: int) -> None:
        """`token` was chosen and appended. Raises ConstraintError if the constraint cannot go on within its limits."""
        self._taken += 1
        if self._penalties is not None:
            self._penalties.take(token)
        if self.machine is not None:
            self.machine.take(token)


def sample(logits_RV: torch.Tensor, samplings: Sequence[Sampling]) -> list[Choice | InvalidLogits | ConstraintError]:
    """One choice a row, or why there is none. A row depends on its own logits and sampling only.

    Shapes: logits float32 [R, V], left as they are. Greedy rows (temperature 0) take the first of equal maxima.
    Log-probabilities are those of the logits as the model gave them, before penalties, bias, constraint or temperature.
    A row whose largest logit is NaN or infinite gives InvalidLogits.
    """
    largest_R = logits_RV.amax(dim=-1).tolist()
    as_they_are = any(s.params.temperature == 0 and not s.adjusts for s in samplings)
    first_R = logits_RV.argmax(dim=-1).tolist() if as_they_are else [0] * len(samplings)
    return [_choose(*row) for row in zip(logits_RV, largest_R, first_R, samplings, strict=True)]


def _choose(
    logits_V: torch.Tensor, largest: float, first: int, sampling: Sampling
) -> Choice | InvalidLogits | ConstraintError:
    """The choice of one row; `first` is where its largest logit stands, if that is what a greedy row takes."""
    p, token, chosen_V = sampling.params, first, logits_V
    try:
        _check(largest, "the model's logits")
        if sampling.adjusts:
            chosen_V = sampling.adjusted(logits_V)
            _check(float(chosen_V.amax()), "after penalties, bias and constraint the logits")
    except (InvalidLogits, ConstraintError) as error:
        return error
    if p.temperature > 0:
        token = draw(chosen_V, p, sampling.generator)
    elif sampling.adjusts:
        token = int(chosen_V.argmax())
    return Choice(token) if p.logprobs is None else _with_logprobs(logits_V, token, p.logprobs)


def _check(largest: float, what: str) -> None:
    """The largest of a row tells: it is NaN if any is."""
    if not -torch.inf < largest < torch.inf:
        raise InvalidLogits(f"{what} have {largest} as their largest: nothing can be sampled from them")


def draw(logits_V: torch.Tensor, p: SamplingParams, generator: torch.Generator | None) -> int:
    """One token from the distribution that is left after temperature, top-k, top-p and min-p, in this order."""
    probs_V = torch.softmax((logits_V - logits_V.amax()) / max(p.temperature, COLDEST), dim=-1)
    if p.top_k or p.top_p < 1:
        probs_K, token_K = _most_likely(probs_V, p.top_k, p.top_p)
    else:
        probs_K, token_K = probs_V, None
    if p.min_p:
        probs_K = torch.where(probs_K >= p.min_p * probs_K.amax(), probs_K, 0.0)
    picked = _pick(probs_K, generator)
    return picked if token_K is None else int(token_K[picked])


def _most_likely(probs_V: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and ids of the top_k tokens, and of these the fewest that have top_p of their sum; descending."""
    size = len(probs_V)
    if top_k:
        probs_K, token_K = probs_V.topk(min(top_k, size))
        keep = _reaching(probs_K, top_p * float(probs_K.sum(dtype=torch.float64))) if top_p < 1 else len(probs_K)
        return probs_K[:keep], token_K[:keep]
    probs_K, token_K = probs_V.topk(min(FIRST_GUESS, size))
    keep = _reaching(probs_K, top_p)
    if keep == len(probs_K) < size:  # perhaps more: all tokens less likely than this together have less than 1 - top_p
        token_K = (probs_V >= 0.5 * (1 - top_p) / size).nonzero()[:, 0]
        probs_K, order_K = probs_V[token_K].sort(descending=True, stable=True)
        token_K = token_K[order_K]
        keep = _reaching(probs_K, top_p)
    return probs_K[:keep], token_K[:keep]


def _reaching(probs_K: torch.Tensor, total: float) -> int:
    """Return the least number of leading entries, at least 1, that sum to `total`; all if they sum to less."""
    before_K = probs_K.cumsum(0, dtype=torch.float64) - probs_K
    return max(1, int((before_K < total).sum()))


def _pick(probs_K: torch.Tensor, generator: torch.Generator | None) -> int:
    """An index by inverse transform: one random number, and never one of probability 0.

    The first index whose cumulative sum is more than a uniform number in [0, sum): in float64, rounding cannot lift
    that number to the sum itself.
    """
    cumulative_K = probs_K.cumsum(0, dtype=torch.float64)
    uniform = torch.rand(1, dtype=torch.float64, generator=generator) * cumulative_K[-1]
    return int(torch.searchsorted(cumulative_K, uniform, right=True))


def _with_logprobs(logits_V: torch.Tensor, token: int, k: int) -> Choice:
    logprobs_V = torch.log_softmax(logits_V, dim=-1)
    top = logprobs_V.topk(min(k, len(logprobs_V)))
    most_likely = tuple(map(TokenLogprob, top.indices.tolist(), top.values.tolist()))
    return Choice(token, float(logprobs_V[token]), most_likely)


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
        largest_R = logits_RV.amax(dim=-1)
        if not bool(largest_R.isfinite().all()):
            at = start + int((~largest_R.isfinite()).nonzero()[0])
            raise InvalidLogits(
                f"the logits after the prompt's token {at:,} have {largest_R[at - start]} as their largest"
            )
        next_R = torch.tensor(self._prompt[start + 1 : start + 1 + len(logits_RV)], device=logits_RV.device)
        logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
        own_R = logprobs_RV.gather(1, next_R[:, None])[:, 0]
        rank_R = (logprobs_RV > own_R[:, None]).sum(dim=-1) + 1
        top = logprobs_RV.topk(min(self._k, logprobs_RV.shape[1]))
        columns = next_R, own_R, rank_R, top.indices, top.values
        self._tokens[start + 1 :] = [
            TokenEvent(token, "", own, tuple(map(TokenLogprob, ids_K, values_K)), rank)
            for token, own, rank, ids_K, values_K in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def event(self) -> PromptEvent:
        """Return the event, once all legs have been added."""
        return PromptEvent(tuple(self._tokens))
