"""Random requests from a seed: prompts that share beginnings, and every option that the API has."""

from __future__ import annotations

import random
from typing import Any

from tests.checkpoints.words import COMMON

Body = dict[str, Any]

WORDS = COMMON.split()
SALTS = (None, None, "red", "green", "blue")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look up {name}.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
    for name in ("weather", "tides")
]
SCHEMA = {
    "type": "object",
    "properties": {"river": {"type": "boolean"}, "miles": {"type": "integer", "maximum": 99}},
    "required": ["river", "miles"],
    "additionalProperties": False,
}


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def shared_beginnings() -> list[str]:
    """System prompts and documents, the same in every run: what requests may have in common."""
    rng = random.Random("shared beginnings")
    return [text(rng, words) for words in (20, 90, 150, 300, 450, 700)]


BEGINNINGS = shared_beginnings()


class Draw:
    """One client's requests. The same seed draws the same ones."""

    def __init__(self, *seed: object) -> None:
        self.rng = random.Random(repr(seed))

    def chat(self, **fields: Any) -> Body:
        messages = [{"role": "user", "content": self.words(1, 120)}]
        if self.rng.random() < 0.7:
            messages.insert(0, {"role": "system", "content": self.rng.choice(BEGINNINGS)})
        return {"messages": messages, **self._shared(), **fields}

    def completion(self, **fields: Any) -> Body:
        prompt: Any = f"{self.rng.choice(BEGINNINGS)} {self.words(0, 60)}"
        form = self.rng.random()
        if form < 0.2:
            prompt = [self.rng.randrange(1, 1000) for _ in range(self.rng.randint(1, 500))]
        elif form < 0.3:
            prompt = [prompt, self.words(1, 40)]
        return {"prompt": prompt, **self._shared(), **fields}

    def long_answer(self) -> Body:
        """Many events, and none of them small."""
        return self.chat(max_tokens=150, ignore_eos=True, logprobs=True, top_logprobs=20, stream=True, n=1, stop=None)

    def comparable(self, body: Body) -> Body:
        """The same request, such that two servers must answer it alike: greedy, or with a seed."""
        seeded = {"temperature": 1.0, "seed": self.rng.randrange(2**32)}
        sampling = seeded if self.rng.random() < 0.3 else {"temperature": 0}
        logprobs = {"logprobs": True, "top_logprobs": 2} if "messages" in body else {"logprobs": 2}
        unlike = ("top_logprobs", "timeout", "echo", "seed", "stream_options")
        return {k: v for k, v in body.items() if k not in unlike} | sampling | logprobs

    def words(self, least: int, most: int) -> str:
        return text(self.rng, self.rng.randint(least, most))

    def _shared(self) -> Body:
        """Options of either endpoint; each is there now and then."""
        rng = self.rng
        offered: list[tuple[float, Body]] = [
            (0.4, {"temperature": 0}),
            (0.2, {"temperature": rng.uniform(0.1, 1.5), "top_p": rng.uniform(0.1, 1), "top_k": rng.randint(0, 50)}),
            (0.2, {"seed": rng.randrange(2**32)}),
            (0.3, {"n": rng.randint(2, 3)}),
            (0.3, {"stop": rng.choice([rng.choice(WORDS), [" " + rng.choice(WORDS), "ing"]])}),
            (0.2, {"presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2)}),
            (0.2, {"repetition_penalty": rng.uniform(0.5, 2)}),
            (0.1, {"logit_bias": {str(rng.randrange(1, 1000)): rng.choice([-100, 5, 100])}}),
            (0.2, {"ignore_eos": True}),
            (0.05, {"cache_salt": f"once-{rng.randrange(2**32)}"}),
        ]
        drawn: Body = {"max_tokens": rng.choice([1, 4, 16, 40, 100]), "cache_salt": rng.choice(SALTS)}
        for chance, fields in offered:
            if rng.random() < chance:
                drawn |= fields
        return drawn
