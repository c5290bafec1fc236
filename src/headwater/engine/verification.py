"""Verification of drafts: a step's rows are sampled in order, each one after a draft only if that draft was sampled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headwater.engine.answering import Answering, Live
from headwater.engine.sampler import Choice
from headwater.engine.step_logits import StepLogits
from headwater.errors import ConstraintError, InvalidLogits
from headwater.schedule.kinds.request import Request
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import Phase
from headwater.schedule.step import Decode, Leg

LogitsTap = Callable[[int, torch.Tensor], None]


@dataclass(eq=False)
class Verified:
    """Rows of one request in a step: its next token's, then one after each draft."""

    live: Live
    first: int  # its first row among those with logits
    drafts: tuple[int, ...]
    right: int = 0  # leading drafts that were sampled
    is_right: bool = False  # whether the last token that was sampled is a draft

    def draft(self, number: int) -> int | None:
        """Return the draft after row `number`, or None after the last one."""
        return self.drafts[number] if number < len(self.drafts) else None


class Verification:
    """Samples the tokens of a step, so that each is the one that decoding without drafts samples."""

    def __init__(self, answering: Answering, scheduler: Scheduler, changed: threading.Condition) -> None:
        """`changed`: the engine's lock."""
        self._answering, self._scheduler, self._changed = answering, scheduler, changed
        self.logits_tap: LogitsTap | None = None  # for tests: gets (request id, logits [V]) of each sampled row

    def sample(self, sampled: list[Leg | Decode], wanting: list[Request], logits_RV: torch.Tensor) -> int:
        """Sample tokens of the requests `wanting` from the rows of `sampled`; return how many drafts were right."""
        first, verified, live = 0, list[Verified](), self._answering.live
        published = {seq.id for seq in wanting}
        for item in sampled:
            if item.seq.id in published and item.seq.id in live:
                live[item.seq.id].drafted += len(item.drafts)
                verified.append(Verified(live[item.seq.id], first, item.drafts))
            first += 1 + len(item.drafts)
        self._verify(logits_RV, verified)
        with self._changed:
            for one in verified:
                if one.drafts and one.live.seq.phase is Phase.DECODE:
                    self._scheduler.accept(one.live.seq, len(one.drafts), one.right)
        return sum(one.right for one in verified)

    def _verify(self, logits_RV: torch.Tensor, reached: list[Verified]) -> None:
        """Sample each request's rows in order until a token is not the draft. If sampling fails, its requests end."""
        number = 0
        logits: StepLogits | None = None
        while reached:
            try:
                logits = logits or StepLogits.of(logits_RV)
                choices = self.choices(logits, [one.first + number for one in reached], reached)
            except Exception as error:
                self._answering.fail_sampling([one.live for one in reached], error)
                return
            for one, choice in zip(reached, choices, strict=True):
                one.is_right = isinstance(choice, Choice) and choice.token == one.draft(number)
                if isinstance(choice, Choice):
                    one.right += one.is_right
                    one.live.accepted += one.is_right
                    self._answering.take(one.live, choice)
                else:
                    self._answering.fail_alone(one.live, choice)
            reached = [one for one in reached if one.is_right and one.live.seq.phase is Phase.DECODE]
            number += 1

    def choices(
        self, logits: StepLogits, rows: list[int], reached: list[Verified]
    ) -> list[Choice | InvalidLogits | ConstraintError]:
        if self.logits_tap is not None:
            for one, logits_V in zip(reached, logits.rows(rows), strict=True):
                self.logits_tap(one.live.seq.id, logits_V)
        return logits.sample(rows, [one.live.sampling for one in reached])
