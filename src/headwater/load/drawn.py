"""Drawn traffic: endless sessions, the same for the same seed.

Lengths are exact where token ids may be sent; otherwise a word stands for a token, which is about right for
vocabularies of common size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from headwater.errors import ConfigError
from headwater.load.session import Session, Turn

COMMON = """
the of and to in is that it was for on are as with his they be at one have this from or had by but some what
there we can out other were all your when up use word how said an each she which do their time if will way about
many then them would write like so these her long make thing see him two has look more day could go come did my
sound no most number who over know water than call first people may down side been now find any new work part
take get place made live where after back little only round man year came show every good me give our under name
"""
WORDS = tuple(COMMON.split())


@dataclass(frozen=True, slots=True)
class Drawing:
    """What is drawn."""

    prompt_tokens: int = 128  # of each turn's own
    prefix_tokens: int = 1024  # of a shared prefix or system prompt
    prefixes: int = 4  # so many different ones
    turns: int = 4  # of a chat
    vocab: int | None = None  # draw token ids below it; None: words
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "prefixes", "turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")


def shared(drawing: Drawing) -> Iterator[Session]:
    """Single requests that begin with one of a pool of prefixes."""
    rng = random.Random(f"shared {drawing.seed}")
    prefixes = _prefixes(drawing)
    for number in count():
        prefix = rng.choice(prefixes)
        own = _draw(rng, drawing.prompt_tokens, drawing.vocab)
        yield Session(f"shared/{number}", (_turn(prefix, own),))


def chat(drawing: Drawing) -> Iterator[Session]:
    """Chats with one of a pool of system prompts."""
    if drawing.vocab is not None:
        raise ConfigError(f"chats are messages, so vocab ({drawing.vocab:,}) does not apply: leave it out")
    rng = random.Random(f"chat {drawing.seed}")
    prefixes = _prefixes(drawing)
    for number in count():
        first = _turn(rng.choice(prefixes), _draw(rng, drawing.prompt_tokens, None))
        later = (_turn((), _draw(rng, drawing.prompt_tokens, None)) for _ in range(drawing.turns - 1))
        yield Session(f"chat/{number}", (first, *later))


def unique(drawing: Drawing) -> Iterator[Session]:
    """Single requests that share nothing."""
    rng = random.Random(f"unique {drawing.seed}")
    for number in count():
        yield Session(f"unique/{number}", (_turn((), _draw(rng, drawing.prompt_tokens, drawing.vocab)),))


DRAWN: dict[str, Callable[[Drawing], Iterator[Session]]] = {"shared": shared, "chat": chat, "unique": unique}


def _prefixes(drawing: Drawing) -> list[tuple[int | str, ...]]:
    rng = random.Random(f"prefixes {drawing.seed}")
    return [_draw(rng, drawing.prefix_tokens, drawing.vocab) for _ in range(drawing.prefixes)]


def _draw(rng: random.Random, n: int, vocab: int | None) -> tuple[int | str, ...]:
    return tuple(rng.choices(WORDS if vocab is None else range(vocab), k=n))


def _turn(prefix: tuple[int | str, ...], own: tuple[int | str, ...]) -> Turn:
    if isinstance(own[0], int):
        return Turn(prompt=(*prefix, *own))  # type: ignore[arg-type]
    messages = [{"role": "user", "content": " ".join(map(str, own))}]
    if prefix:
        messages.insert(0, {"role": "system", "content": " ".join(map(str, prefix))})
    return Turn(tuple(messages))
