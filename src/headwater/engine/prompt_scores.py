"""Log probabilities of a prompt's own tokens, gathered leg by leg.

R: rows of a leg. V: tokens of the vocabulary. K: the most likely ones that were asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.errors import InvalidLogits
from headwater.events import PromptEvent, TokenEvent, TokenLogprob
from headwater.request import SamplingParams


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
        top = logprobs_RV.topk(min(self._k, logprobs_RV.shape[1]))
        rows = zip(next_R.tolist(), own_R.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
        self._tokens[start + 1 :] = [
            TokenEvent(token, "", own, tuple(map(TokenLogprob, ids_K, values_K)))
            for token, own, ids_K, values_K in rows
        ]

    def event(self) -> PromptEvent:
        """Return the event, once all legs have been added."""
        return PromptEvent(tuple(self._tokens))
