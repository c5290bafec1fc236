"""A request of which nothing is known but when it came and how long it was."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    at: float  # seconds from the recording's beginning
    input_tokens: int
    output_tokens: int
