"""The last requests and what each of them resumed from."""

from __future__ import annotations

import time
from collections import Counter, deque

from headwater.account import Reason
from headwater.server.http.context import RequestContext
from headwater.server.observe.record import GenerationEnd

KEPT = 100


class Recent:
    """A ring of the last answers, and sums over all of them. Numbers and names only, no text."""

    def __init__(self) -> None:
        self._ring: deque[dict[str, object]] = deque(maxlen=KEPT)
        self._serial = 0
        self.prompts = self.hits = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.reasons: Counter[Reason] = Counter({reason: 0 for reason in Reason})

    def token(self, gap: float) -> None:
        """Only ends are kept."""

    def ended(self, end: GenerationEnd) -> None:
        account = end.account
        self.prompts += 1
        self.hits += account.cached_tokens > 0
        self.prompt_tokens += account.prompt_tokens
        self.cached_tokens += account.cached_tokens
        self.output_tokens += end.output_tokens
        self.reasons[account.reason] += 1
        self._add(end.as_dict())

    def lost(self, request: RequestContext, endpoint: str, error: Exception | None) -> None:
        finish = "cancelled" if error is None else type(error).__name__
        entry = {"request_id": request.id, "endpoint": endpoint, "number": 0, "finish_reason": finish}
        self._add(entry | {"total_seconds": round(request.seconds, 6)})

    def since(self, serial: int) -> list[dict[str, object]]:
        """Those that came after the one with that serial, oldest first."""
        return [entry for entry in self._ring if entry["serial"] > serial]  # type: ignore[operator]

    def _add(self, entry: dict[str, object]) -> None:
        self._serial += 1
        self._ring.append({"serial": self._serial, "time": round(time.time(), 3), **entry})
