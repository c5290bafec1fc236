"""Sampling: logits to tokens, greedy, or drawn after temperature, top-k, top-p and min-p.

R: rows of a step. V: tokens of the vocabulary. K: tokens that a filter has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headwater.engine.constraint import ConstraintMachine
from headwater.engine.penalties import Penalties
from headwater.errors import ConstraintError, InvalidLogits
from headwater.events import TokenLogprob
from headwater.request import SamplingParams

COLDEST = 1e-6  # temperatures below are this one: float32 could not tell them apart, and 0 would divide 0
FIRST_GUESS = 256  # tokens among which top-p looks first


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, its log-probability under the unmodified logits if asked for, and the most likely ones."""

    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class Sampling:
    """Sampling state of one request: parameters, generator, penalties and constraint.

    `take` advances it once for each appended token. A preempted request keeps its state, and replayed tokens do not
    advance it again.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], machine: ConstraintMachine | None = None) -> None:
        self.params, self.machine = params, machine
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
        return self._penalised or self.machine is not None

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
        if self.machine is not None:
            logits_V = logits_V.masked_fill(~self.machine.allowed(), -torch.inf)
        return logits_V

    def take(self, token: int) -> None:
        """`token` was chosen and appended. Raises ConstraintError if the constraint cannot go on within its limits."""
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
    top = logprobs_V.topk(min(k, len(logprobs_V))) if k else None
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True) if top else ()
    return Choice(token, float(logprobs_V[token]), tuple(TokenLogprob(t, v) for t, v in pairs))
