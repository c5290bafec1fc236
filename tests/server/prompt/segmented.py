"""Tokenizers with and without a token for the separator, and the tokens of prompts with segments."""

from functools import cache

from tokenizers import AddedToken, Tokenizer

from headwater.config import DEFAULT_SEPARATOR as SEP
from headwater.request import Span
from tests.server.fake_engine import byte_tokenizer

__all__ = ["SEP", "TOKENIZERS", "held_tokenizer", "ids_of", "segment", "shown", "spans", "text", "user"]


@cache
def held_tokenizer() -> Tokenizer:
    """Return the byte tokenizer with the separator as a special token."""
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken(SEP, special=True)])
    return tokenizer


TOKENIZERS = (byte_tokenizer, held_tokenizer)


def ids_of(tokenizer: Tokenizer, *parts: str) -> tuple[int, ...]:
    """Return the tokens of texts without separators, and of separators if they are a token."""
    held = tokenizer.token_to_id(SEP)
    ids: list[int] = []
    for part in parts:
        ids += ([] if held is None else [held]) if part == SEP else byte_tokenizer().encode(part).ids
    return tuple(ids)


def shown(tokenizer: Tokenizer, tokens: tuple[int, ...], segments: tuple[Span, ...]) -> list[str]:
    """Return the segments' texts, without separators."""
    held = tokenizer.token_to_id(SEP)
    kept = [[token for token in tokens[span.start : span.end] if token != held] for span in segments]
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in kept]


def spans(*pairs: tuple[int, int]) -> tuple[Span, ...]:
    return tuple(Span(*pair) for pair in pairs)


def text(words: str, **more: object) -> dict[str, object]:
    return {"type": "text", "text": words, **more}


def segment(words: str) -> dict[str, object]:
    return text(words, segment=True)


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}
