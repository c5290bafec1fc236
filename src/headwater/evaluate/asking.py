"""A run of an evaluation: every item, asked of a server in each serving mode, and scored."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import groupby

from headwater.evaluate.items import Item, Json
from headwater.evaluate.modes import MODES, Asking
from headwater.evaluate.scoring import Score, score
from headwater.evaluate.server import Answer, Server
from headwater.journal import Journal


@dataclass(frozen=True, slots=True)
class Scored:
    """An item, an answer to it, and the answer's score."""

    item: Item
    answer: Answer
    score: Score


@dataclass
class Run:
    """All items under all modes. `at_once` groups are asked in parallel, the items of a group one after the other."""

    server: Server
    items: Sequence[Item]
    max_tokens: int = 128
    thinking: bool = False
    at_once: int = 1
    logprobs: bool = False  # request them, so that answers are compared by more than their text
    on_answer: Callable[[Answer], None] = lambda answer: None
    # answers of an earlier run, by mode and group
    journal: Journal = field(default_factory=lambda: Journal(None, None))
    name: str = field(default_factory=lambda: secrets.token_hex(8))

    def asked(self, modes: Sequence[str]) -> dict[str, list[Scored]]:
        """Ask every item in every mode. Returns the columns in order, each with the items in the file's order."""
        columns: dict[str, list[Scored]] = {}
        for mode in modes:
            answers = self._mode(mode)
            for column in MODES[mode].columns:
                columns[column] = [scored for scored in answers if scored.answer.column == column]
        return columns

    def fields(self, item: Item) -> Json:
        """Return the fields of an item's request that all modes share."""
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

    def _mode(self, mode: str) -> list[Scored]:
        groups = [list(members) for _, members in groupby(enumerate(self.items), key=lambda pair: pair[1].group)]
        with ThreadPoolExecutor(self.at_once) as pool:
            done = list(pool.map(lambda group: self._group(mode, group), groups))
        return sorted((scored for group in done for scored in group), key=lambda scored: scored.answer.item)

    def _group(self, mode: str, group: Sequence[tuple[int, Item]]) -> list[Scored]:
        """Ask each item of a group, by its index in the file, in all rounds of the mode before the next item."""
        name = f"{mode}, {group[0][0]}"
        if name in self.journal:
            answers = [_kept(told) for told in self.journal[name]]
            for answer in answers:
                self.on_answer(answer)
        else:
            answers = [self._answer(mode, number, item, time) for number, item in group for time in _rounds(mode)]
            if not any(answer.outcome == "error" for answer in answers):
                self.journal.add(name, [asdict(answer) for answer in answers])
        items = dict(group)
        return [Scored(items[one.item], one, score(items[one.item], one)) for one in answers]

    def _answer(self, mode: str, number: int, item: Item, time: int) -> Answer:
        added = MODES[mode].fields(Asking(item, number, time, self.name))
        answer = self.server.answer(number, MODES[mode].columns[time], {**self.fields(item), **added})
        self.on_answer(answer)
        return answer


def _rounds(mode: str) -> range:
    return range(len(MODES[mode].columns))


def _kept(told: Json) -> Answer:
    """Return an answer from the journal's JSON."""
    logprobs = told["logprobs"]
    return Answer(**{**told, "calls": tuple(told["calls"]), "logprobs": None if logprobs is None else tuple(logprobs)})
