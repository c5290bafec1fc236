"""Measured points of a real engine: what one request at a time took. Seconds and tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Point:
    """A request that was alone on the engine."""

    prompt_tokens: int
    cached_tokens: int
    ttft: float
    output_tokens: int = 1
    token_time: float | None = None  # seconds a token after the first; None: not measured


def read_points(path: Path) -> tuple[list[Point], int]:
    """The points of a file, and how many requests were left out as they failed or were not alone.

    A file is JSON: a list of {"prompt_tokens", "cached_tokens", "ttft_ms"} with "output_tokens" and "itl_ms" beside
    them where they are known, or what `headwater bench serve --json` writes. Raises ConfigError for anything else.
    """
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if isinstance(found, dict) and isinstance(found.get("phases"), list):
        return _of_bench(path, found["phases"])
    if not isinstance(found, list):
        raise ConfigError(f"{path}: neither a list of points nor a report of `headwater bench serve`")
    return [_listed(f"{path}: point {number}", one) for number, one in enumerate(found, 1)], 0


def _listed(where: str, one: object) -> Point:
    if not isinstance(one, dict):
        raise ConfigError(f"{where} is {one!r}, must be an object")
    itl = None if one.get("itl_ms") is None else _number(where, one, "itl_ms") / 1000
    return _point(
        where,
        prompt=_number(where, one, "prompt_tokens"),
        cached=_number(where, one, "cached_tokens", 0),
        ttft=_number(where, one, "ttft_ms") / 1000,
        output=_number(where, one, "output_tokens", 1),
        token_time=itl,
    )


def _of_bench(path: Path, phases: Sequence[Any]) -> tuple[list[Point], int]:
    """Requests that were answered while no other was: what others take is not the model's to tell."""
    points: list[Point] = []
    left_out = 0
    for phase in phases:
        rows = phase.get("rows", []) if isinstance(phase, dict) else []
        for number, row in enumerate(rows):
            where = f"{path}: request {number}"
            if row.get("outcome") != "ok" or row.get("ttft") is None or not _alone(row, rows):
                left_out += 1
                continue
            points.append(_of_row(where, row))
    return points, left_out


def _of_row(where: str, row: Mapping[str, Any]) -> Point:
    gaps, output = row.get("gaps") or [], row.get("output_tokens") or 1
    return _point(
        where,
        prompt=_number(where, row, "prompt_tokens"),
        cached=_number(where, row, "cached_tokens", 0),
        ttft=_number(where, row, "ttft"),
        output=output,
        token_time=sum(gaps) / max(len(gaps), output - 1) if gaps else None,
    )


def _alone(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    return not any(
        other is not row and other["sent"] < row["ended"] and row["sent"] < other["ended"]
        for other in rows
        if other.get("outcome") != "skipped"
    )


def _point(where: str, prompt: float, cached: float, ttft: float, output: float, token_time: float | None) -> Point:
    if not 0 <= cached < prompt:
        raise ConfigError(f"{where}: {cached:g} of {prompt:g} prompt tokens are cached, at least one must be computed")
    if ttft <= 0:
        raise ConfigError(f"{where}: the first token came after {1000 * ttft:g} ms, must be above 0")
    return Point(int(prompt), int(cached), ttft, max(1, int(output)), token_time or None)


def _number(where: str, values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = values.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise ConfigError(f"{where}: {name} is {value!r}, must be a number")
    return value
