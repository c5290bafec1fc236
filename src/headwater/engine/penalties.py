"""Changes of a request's logits: penalties on tokens of the prompt and the output, and requested biases.

V: tokens of the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from headwater.request import SamplingParams


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
