"""Work of other workers of a cluster on a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Handover:
    """Work of other workers of a cluster on a request."""

    output: tuple[int, ...] = ()  # tokens of the answer so far, after which it continues with the same bits
    peers: tuple[bytes, ...] = ()  # incarnations of workers that have more of the prompt cached, or have prefilled it
    follows: int | None = None  # number of the prompt's prefill that is followed
    begun: bool = False  # the client has tokens of the answer from another worker


NO_HANDOVER = Handover()
