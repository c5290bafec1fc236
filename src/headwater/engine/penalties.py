"""Penalties and logit bias of one request.

V: tokens of the vocabulary. K: tokens whose logits change, and room for more of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from headwater.request import SamplingParams


class Penalties:
    """Repetition, presence and frequency penalty and logit bias of one request; O(1) work a generated token.

    Repetition (Keskar et al. 2019, section 4.1) holds for tokens of the prompt and of the output: a positive logit is
    divided by it, a negative one multiplied. Presence and frequency hold for the output alone and are subtracted; the
    bias is added last, so that no penalty scales it. Memory and work are those of the tokens that have any.
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
        """`token` was appended to the output."""
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
        """Make room for as many tokens again."""
        room = (0, max(16, len(self._token_K)))
        self._token_K, self._added_K, self._factor_K = (
            F.pad(part_K, room) for part_K in (self._token_K, self._added_K, self._factor_K)
        )

    def apply(self, logits_V: torch.Tensor) -> torch.Tensor:
        """Return the logits after penalties and bias, in memory of their own."""
        some = slice(len(self._at))
        token_K = self._token_K[some]
        logit_K = logits_V[token_K]
        if self._params.repetition_penalty != 1:
            factor_K = self._factor_K[some]
            logit_K = torch.where(logit_K > 0, logit_K / factor_K, logit_K * factor_K)
        out_V = logits_V.clone()
        out_V[token_K] = logit_K + self._added_K[some]
        return out_V
