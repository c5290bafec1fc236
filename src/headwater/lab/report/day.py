"""The report of a day of a server: hits, misses by reason with the remedy, and memory that would have paid."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass

from headwater.account import REMEDIES, Reason
from headwater.lab.report import environment, part


@dataclass(frozen=True, slots=True)
class Day:
    """Figures of a period, from metrics or a replayed recording. `memory` has sentences."""

    source: str
    period: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    misses: Mapping[str, int]  # prompts by reason
    memory: tuple[str, ...]

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def rows(self) -> list[tuple[str, int, float, str]]:
        """Reason, prompts, share of the requests and remedy, the most frequent first; `full` is not a miss."""
        missed = {Reason(reason): n for reason, n in self.misses.items() if n and reason in {*Reason}}
        missed.pop(Reason.FULL, None)
        ordered = sorted(missed.items(), key=lambda item: -item[1])
        return [(reason.value, n, n / max(1, self.requests), REMEDIES[reason]) for reason, n in ordered]


def page(day: Day) -> str:
    """Return one self-contained HTML page, without a script."""
    icon = part("icon.svg")
    return (
        environment()
        .get_template("day.html.jinja")
        .render(day=day, style=part("report.css"), icon=icon, icon_base64=base64.b64encode(icon.encode()).decode())
    )
