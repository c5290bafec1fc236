"""Checks of lengths: of a prompt, of prompt and `max_tokens` together, of a stored segment, and of counts of answers.

The scheduler checks whether a request fits in memory with the running ones (`headwater.schedule.limits`).
"""

from __future__ import annotations

from headwater.config import ServeConfig
from headwater.errors import RequestTooLarge
from headwater.server.http.errors import BadRequest
from headwater.server.http.exchange import ServedEngine

MAX_TOKENS = 2**31 - 1  # of a field; far above any model, whose own length is checked with the prompt
MAX_SEGMENTS = 1_024  # of one request
MAX_N = 128  # answers to one prompt


class Lengths:
    """Lengths that the engine accepts: at most `max_model_len` tokens of prompt and answer together."""

    def __init__(self, engine: ServedEngine, config: ServeConfig) -> None:
        self._engine = engine
        self._answers = config.max_running + config.max_waiting

    def check_answers(self, prompts: int, n: int) -> None:
        """Raise BadRequest for more answers than the server takes, before any work goes into them."""
        if prompts * n > self._answers:
            wanted = f"{prompts:,} prompts with n {n:,} are {prompts * n:,} answers"
            raise BadRequest(f"{wanted}, the server takes {self._answers:,} at once", "n")

    def check_max_tokens(self, max_tokens: int | None, scores_prompt: bool) -> None:
        """Raise BadRequest for a request of 0 tokens, unless it scores its prompt."""
        if max_tokens == 0 and not scores_prompt:
            unless = "unless echo and logprobs, or prompt_logprobs, are set"
            raise BadRequest(f"max_tokens is 0, at least 1 is needed {unless}", "max_tokens")

    def check_min_tokens(self, min_tokens: int, max_tokens: int) -> None:
        """Raise BadRequest for an answer whose minimal length exceeds its maximal length."""
        if min_tokens > max_tokens:
            both = f"min_tokens is {min_tokens:,}, and the answer has at most {max_tokens:,} tokens"
            raise BadRequest(both, "min_tokens")

    def max_tokens(self, prompt: int, segments: int, wanted: int | None, may_be_cut: bool) -> int:
        """Return the answer's maximal length: `wanted`, or all that the prompt of this many tokens leaves.

        `may_be_cut`: a greater `wanted` length is reduced to all that is left, and not refused.
        Raises RequestTooLarge if prompt and answer are too long, BadRequest for an empty prompt or too many segments.
        """
        limit = self._engine.max_model_len
        taker = "the model" if limit == self._engine.spec.max_length else "the server's memory"
        if prompt == 0:
            raise BadRequest("prompt has 0 tokens, at least 1 is needed", "prompt")
        if prompt >= limit:
            raise RequestTooLarge(f"prompt has {prompt:,} tokens, {taker} takes {limit:,} with the answer")
        left = limit - prompt
        max_tokens = left if wanted is None or (may_be_cut and wanted > left) else wanted
        if prompt + max_tokens > limit:
            raise RequestTooLarge(
                f"prompt has {prompt:,} tokens and its answer may have {max_tokens:,}, together "
                f"{prompt + max_tokens:,}; {taker} takes {limit:,}"
            )
        if segments > MAX_SEGMENTS:
            raise BadRequest(f"prompt has {segments:,} segments, at most {MAX_SEGMENTS:,} are accepted", "prompt")
        return max_tokens

    def check_segment(self, number: int, tokens: int) -> None:
        """Raise RequestTooLarge for a text to be stored as a segment that no prompt could hold."""
        limit = self._engine.max_model_len
        if tokens >= limit:
            raise RequestTooLarge(f"text {number} has {tokens:,} tokens, the server takes {limit:,} with an answer")
