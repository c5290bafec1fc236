"""Comparisons of the prompts of traces."""

from itertools import takewhile

from headwater.traces.request import TOKEN_BYTES, Request


def shared_tokens(one: Request, other: Request) -> int:
    """Return the number of leading tokens that two prompts share."""
    texts = (memoryview(request.text[: request.prompt_tokens * TOKEN_BYTES]).cast("i") for request in (one, other))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
