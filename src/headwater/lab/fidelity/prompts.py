"""Prompts of a fidelity study: segments and their tokens, as a server would tokenise them."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from headwater.errors import ConfigError
from headwater.evaluate.items import DEFAULT_TASKS, Item, Json, item_of, read_items
from headwater.evaluate.modes import SEPARATOR, marked
from headwater.evaluate.perplexity import read_utf8
from headwater.models.load import LoadedModel
from headwater.request import Span
from headwater.server.prompt.chat import ChatPrompter
from headwater.server.prompt.segments import SegmentEncoder
from headwater.server.prompt.template import ChatTemplate
from headwater.server.requests.chat import ChatRequest
from headwater.traces.source import Source


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens, and the spans of the segments among them."""

    tokens: tuple[int, ...]
    segments: tuple[Span, ...]

    @property
    def key(self) -> bytes:
        """Token ids of four bytes each."""
        return array("I", self.tokens).tobytes()


class Prompts:
    """Builds prompts for one model."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._encoder = SegmentEncoder(loaded.tokenizer)
        self._chat = None
        if loaded.chat_template is not None:
            template = ChatTemplate(loaded.chat_template, loaded.special_tokens)
            self._chat = ChatPrompter(loaded.tokenizer, template, self._encoder)

    def of_text(self, text: str) -> Prompt:
        """Tokenise a completion's prompt that has separators in it."""
        encoded = self._encoder.encode_prompt(text)
        return Prompt(encoded.ids, encoded.segments)

    def of_item(self, item: Item, number: int) -> Prompt:
        """Tokenise an evaluation item with its documents marked, in the order that its number gives.

        Without a chat template, the contents of its messages follow one another.
        """
        messages = marked(item, number)
        if self._chat is None:
            return self.of_text("\n\n".join(str(message["content"]) for message in messages))
        asked: Json = {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
        if item.tools:
            asked["tools"] = list(item.tools)
        body = ChatRequest.model_validate(asked)
        made = self._chat.prepare(body.conversation(self._chat.rules))
        return Prompt(made.prompt, made.segments)

    def read(self, path: Path) -> Iterator[Prompt]:
        """Read a file of JSON lines, or else a text with separators, plain or packed.

        A line has `documents` (texts), a `question`, and optionally a `lead` before them; or it is an evaluation item.
        Raises ConfigError for any other file.
        """
        if not path.name.removesuffix(".zst").removesuffix(".gz").endswith((".jsonl", ".json")):
            yield self.of_text(read_utf8(path))
            return
        source = Source(path)
        for number, value in enumerate(source.records()):
            try:
                yield self._of_line(value, number)
            except ValueError as error:
                raise ConfigError(f"{path}, {source.place}: {error}") from error

    def _of_line(self, value: Any, number: int) -> Prompt:
        if isinstance(value, dict) and "messages" in value:
            return self.of_item(item_of(value), number)
        if not isinstance(value, dict) or not isinstance(value.get("documents"), list):
            raise ValueError("a prompt needs documents, a list of texts, and a question")
        parts = [value.get("lead", ""), *value["documents"], value.get("question", "")]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("lead, documents and question must be texts")
        return self.of_text(SEPARATOR.join(parts))

    def sampled(self, count: int, seed: int, longest: int) -> list[Prompt]:
        """Draw from the held-out items with documents, those of at most `longest` tokens.

        Raises ConfigError if all have more.
        """
        items, shortest = self._shuffled(seed), math.inf
        chosen: list[Prompt] = []
        for number, item in enumerate(items):
            prompt = self.of_item(item, number)
            shortest = min(shortest, len(prompt.tokens))
            if len(prompt.tokens) <= longest:
                chosen.append(prompt)
            if len(chosen) == count:
                break
        if not chosen:
            raise ConfigError(f"held-out prompts have {shortest:,} tokens at least, at most {longest:,} were allowed")
        return chosen

    def cut(self, tokens: int, parts: int, seed: int) -> Prompt:
        """Cut `tokens` tokens of documents into equal parts, all but the first of which are segments.

        One more token follows them. Raises ConfigError for more parts than tokens, and for more tokens than there are.
        """
        if parts > tokens:
            raise ConfigError(f"{tokens:,} tokens cannot be cut into {parts:,} parts")
        texts = (text for item in self._shuffled(seed) for text in item.documents)
        ids = list(islice((token for text in texts for token in self._encoder.encode_segment(text)), tokens + 1))
        if len(ids) <= tokens:
            raise ConfigError(f"the held-out documents have {len(ids):,} tokens, to cut {tokens:,} takes one more")
        bounds = [tokens * i // parts for i in range(parts + 1)]
        spans = (Span(a, b) for a, b in pairwise(bounds[1:]))
        return Prompt(tuple(ids), tuple(spans))

    @staticmethod
    def _shuffled(seed: int) -> list[Item]:
        """Shuffle the held-out items with documents."""
        items = [item for item in read_items(DEFAULT_TASKS) if item.documents]
        random.Random(seed).shuffle(items)
        return items


@dataclass(frozen=True, slots=True)
class Wanted:
    """The prompts of a study: those of a file, or cut out of documents, or a sample of the held-out items."""

    file: Path | None = None
    cut: int | None = None  # tokens
    parts: int = 2  # that these are cut into
    count: int = 8  # of the sample
    longest: int = 1024  # tokens of a prompt of the sample
    seed: int = 0

    def prompts(self, loaded: LoadedModel) -> list[Prompt]:
        """Return those with segments; raises ConfigError if there are none, or one is longer than the model takes."""
        if self.file is not None and self.cut is not None:
            raise ConfigError(f"prompts are {self.file} and {self.cut:,} tokens of documents: give one of them")
        maker = Prompts(loaded)
        if self.file is not None:
            found = list(maker.read(self.file))
        elif self.cut is not None:
            found = [maker.cut(self.cut, self.parts, self.seed)]
        else:
            found = maker.sampled(self.count, self.seed, self.longest)
        chosen = [prompt for prompt in found if prompt.segments]
        if not chosen:
            raise ConfigError(f"{len(found)} prompts, 0 of them with segments: at least 1 is needed")
        longest, most = max(len(prompt.tokens) for prompt in chosen), loaded.spec.max_length
        if longest > most:
            raise ConfigError(f"a prompt has {longest:,} tokens, the model takes {most:,}")
        return chosen
