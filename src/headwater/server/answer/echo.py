"""Prompts that are given back before their answers, with log probabilities where those are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tokenizers import Tokenizer

from headwater.engine.detokenizer import decoder_for
from headwater.events import PromptEvent, TokenEvent
from headwater.server.http.exchange import Events
from headwater.server.prompt.encoding import Encoded, encode, whole_characters
from headwater.server.requests.chat import CompletionRequest

ECHO = -1  # stands for the tokens of a prompt that is given back
Echo = Callable[[Events], Events]


def echo_of(tokenizer: Tokenizer, body: CompletionRequest, encoded: Sequence[Encoded]) -> Echo:
    """How each answer gets its prompt before it; `encoded`: the prompts."""
    add = scored if body.scores_prompt else echoed
    texts = [
        text_of_tokens(tokenizer, prompt, one.ends) if body.scores_prompt else whole_text(tokenizer, prompt)
        for prompt, one in zip(body.prompts, encoded, strict=True)
    ]
    return partial(add, texts=[text for text in texts for _ in range(body.answers)])


async def echoed(events: Events, texts: Sequence[str]) -> Events:
    """The same events, each answer preceded by a text as if it were its first token's."""
    for number, text in enumerate(texts):
        yield number, TokenEvent(ECHO, text)
    async for number, event in events:
        yield number, event


async def scored(events: Events, texts: Sequence[Sequence[str]]) -> Events:
    """The same events, with a prompt's tokens as if they were an answer's first; `texts`: of each token, by answer."""
    async for number, event in events:
        if isinstance(event, PromptEvent):
            for token, text in zip(event.tokens, texts[number], strict=True):
                yield number, replace(token, text=text)
        else:
            yield number, event


def whole_text(tokenizer: Tokenizer, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)


def text_of_tokens(tokenizer: Tokenizer, prompt: str | list[int], ends: Sequence[int] | None = None) -> list[str]:
    """What of the prompt's text each of its tokens adds; a character of several tokens is the first one's.

    For token ids the last one's: their text comes as it becomes whole. `ends` are the tokens' in the text, where it was
    encoded in another way than as a whole.
    """
    if isinstance(prompt, str):
        whole = [end for _, end in encode(tokenizer, prompt, True).offsets] if ends is None else ends
        return _cut(whole_characters(prompt), whole)
    special = frozenset(id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    decoder = decoder_for(tokenizer, (), special)
    texts = [decoder.push(token) for token in prompt]
    texts[-1] += decoder.flush()
    return texts


def _cut(text: str, ends: Sequence[int]) -> list[str]:
    """The text at these ends; the last piece goes on to its end."""
    pieces, at = [], 0
    for end in (*ends[:-1], len(text)):
        pieces.append(text[at:end])
        at = max(at, end)
    return pieces
