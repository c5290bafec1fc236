"""From logits to tokens: greedy, or drawn after temperature, top-k, top-p and min-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.types import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, its log-probability under the unmodified logits if asked for, and the most likely ones."""

    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


def sample(
    logits_RV: torch.Tensor, params: list[SamplingParams], generators: list[torch.Generator | None]
) -> list[Choice]:
    """One choice a row. A row depends on its own logits, parameters and generator only.

    Shapes: logits float32 [R, vocabulary]. Greedy rows (temperature 0) take the first of equal maxima.
    """
    best_R = logits_RV.argmax(dim=-1).tolist()
    choices = []
    for logits_V, best, p, generator in zip(logits_RV, best_R, params, generators, strict=True):
        token = best if p.temperature == 0 else draw(logits_V, p, generator)
        choices.append(Choice(token) if p.logprobs is None else _with_logprobs(logits_V, token, p.logprobs))
    return choices


def draw(logits_V: torch.Tensor, p: SamplingParams, generator: torch.Generator | None) -> int:
    """One token from the distribution that is left after the filters, applied in the order of their names here."""
    probs_V = torch.softmax(logits_V / p.temperature, dim=-1)
    probs_K, token_K = probs_V.sort(descending=True, stable=True)
    if p.top_k:
        probs_K, token_K = probs_K[: p.top_k], token_K[: p.top_k]
    if p.top_p < 1:
        probs_K = probs_K / probs_K.sum()
        keep = int((probs_K.cumsum(0) - probs_K < p.top_p).sum())  # the first that reaches top_p still counts
        probs_K, token_K = probs_K[: max(1, keep)], token_K[: max(1, keep)]
    if p.min_p:
        keep = int((probs_K >= p.min_p * probs_K[0]).sum())
        probs_K, token_K = probs_K[:keep], token_K[:keep]
    return int(token_K[torch.multinomial(probs_K, 1, generator=generator)])


def _with_logprobs(logits_V: torch.Tensor, token: int, k: int) -> Choice:
    logprobs_V = torch.log_softmax(logits_V, dim=-1)
    top = logprobs_V.topk(min(k, len(logprobs_V))) if k else None
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True) if top else ()
    return Choice(token, float(logprobs_V[token]), tuple(TokenLogprob(t, v) for t, v in pairs))
