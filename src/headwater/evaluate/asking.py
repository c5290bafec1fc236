"""Asks a server all items in some ways, and scores the answers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby

from headwater.evaluate.answered import Answered
from headwater.evaluate.item import Item, Json
from headwater.evaluate.score import Score, score
from headwater.evaluate.server import Server
from headwater.evaluate.ways import WAYS, Asking

Number = tuple[int, Item]  # an item and its place in the file


@dataclass(frozen=True, slots=True)
class Scored:
    item: Item
    answered: Answered
    score: Score


@dataclass
class Run:
    """All items under all ways. Groups are asked `at_once` beside each other, a group's items one after the other."""

    server: Server
    items: Sequence[Item]
    max_tokens: int = 128
    thinking: bool = False
    at_once: int = 1
    logprobs: bool = False  # ask for them, so that not only texts can be compared
    on_answer: Callable[[Answered], None] = lambda answered: None
    name: str = field(default_factory=lambda: secrets.token_hex(8))

    def asked(self, ways: Sequence[str]) -> dict[str, list[Scored]]:
        """Columns of these ways, in order, each with every item in the file's order."""
        columns: dict[str, list[Scored]] = {}
        for way in ways:
            answers = self._way(way)
            for column in WAYS[way].columns:
                columns[column] = [scored for scored in answers if scored.answered.column == column]
        return columns

    def fields(self, item: Item) -> Json:
        """What a request of this item says under every way."""
        fields: Json = {
            "messages": list(item.messages),
            "max_tokens": self.max_tokens,
            "chat_template_kwargs": {"enable_thinking": self.thinking},
        }
        if item.tools:
            fields["tools"] = list(item.tools)
        if self.logprobs:
            fields["logprobs"] = True
        return fields

    def _way(self, way: str) -> list[Scored]:
        groups = [list(members) for _, members in groupby(enumerate(self.items), key=lambda pair: pair[1].group)]
        with ThreadPoolExecutor(self.at_once) as pool:
            done = list(pool.map(lambda group: self._group(way, group), groups))
        return sorted((scored for group in done for scored in group), key=lambda scored: scored.answered.item)

    def _group(self, way: str, group: Sequence[Number]) -> list[Scored]:
        """Each item as often as the way asks it, before the next one."""
        done = []
        for number, item in group:
            for time, column in enumerate(WAYS[way].columns):
                added = WAYS[way].fields(Asking(item, number, time, self.name))
                answered = self.server.answered(number, column, {**self.fields(item), **added})
                self.on_answer(answered)
                done.append(Scored(item, answered, score(item, answered)))
        return done
