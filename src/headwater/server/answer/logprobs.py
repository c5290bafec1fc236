"""Log probabilities in OpenAI's two forms."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from headwater.engine.detokenizer import byte_table
from headwater.events import TokenEvent

LEAST = -9999.0  # what OpenAI writes for a token that cannot be; JSON has no infinity


class TokenNames:
    """How a single token is written: many are no whole character by themselves."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = byte_table(tokenizer)

    def raw(self, token: int) -> bytes:
        if self._table is not None:
            return self._table.raw(token)
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()

    def name(self, token: int) -> str:
        """The token's text, or "bytes:\\xf0\\x9f" where it is no text, so that no two tokens share a name."""
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(names: TokenNames, tokens: list[TokenEvent]) -> dict[str, Any]:
    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": names.name(token), "logprob": finite(logprob), "bytes": list(names.raw(token))}

    content = [
        {**entry(t.token, t.logprob), "top_logprobs": [entry(top.token, top.logprob) for top in t.top]} for t in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(names: TokenNames, tokens: list[TokenEvent], offset: int) -> dict[str, Any]:
    """`offset`: characters of the answer that were shown before the first of these tokens.

    A prompt's first token, which has no log probability, has null in both lists, as OpenAI writes it.
    """
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [names.name(t.token) for t in tokens],
        "token_logprobs": [finite(t.logprob) for t in tokens],
        "top_logprobs": [
            None if t.logprob is None else {names.name(top.token): finite(top.logprob) for top in t.top} for t in tokens
        ],
        "text_offset": offsets,
    }


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)
