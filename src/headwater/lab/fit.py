"""The cost model's efficiencies and overhead, fitted to measured times of requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.errors import ConfigError
from headwater.lab.cost import Device, Load, StepCost
from headwater.models.profiles.profile import Profile


@dataclass(frozen=True, slots=True)
class Point:
    """Measured request on an otherwise idle engine."""

    prompt_tokens: int
    cached_tokens: int
    ttft: float
    output_tokens: int = 1
    token_time: float | None = None  # seconds a token after the first; None: not measured


def read_points(path: Path) -> tuple[list[Point], int]:
    """Read the points of a file; return them and the number of requests left out: failed or overlapping ones.

    A file is JSON: a list of {"prompt_tokens", "cached_tokens", "ttft_ms"}, also "output_tokens" and "itl_ms" if they
    are known, or the report of `headwater bench serve --json`. Raises ConfigError for anything else.
    """
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if isinstance(found, dict) and isinstance(found.get("phases"), list):
        try:
            return _of_bench(path, found["phases"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not a report of `headwater bench serve`: {error!r}") from error
    if not isinstance(found, list):
        raise ConfigError(f"{path}: neither a list of points nor a report of `headwater bench serve`")
    return [_listed(f"{path}: point {number}", one) for number, one in enumerate(found, 1)], 0


def _listed(where: str, one: object) -> Point:
    if not isinstance(one, dict):
        raise ConfigError(f"{where} is {one!r}, must be an object")
    token_time = None if one.get("itl_ms") is None else _number(where, one, "itl_ms") / 1000
    return _point(where, one, _number(where, one, "ttft_ms") / 1000, token_time)


def _of_bench(path: Path, phases: Sequence[Any]) -> tuple[list[Point], int]:
    """Return the requests that overlap with no other one: the model has no term for others."""
    points: list[Point] = []
    left_out = 0
    for phase in phases:
        rows = phase.get("rows", [])
        for number, row in enumerate(rows):
            if row.get("outcome") == "ok" and row.get("ttft") is not None and _is_isolated(row, rows):
                points.append(_of_row(f"{path}: request {number}", row))
            else:
                left_out += 1
    return points, left_out


def _of_row(where: str, row: Mapping[str, Any]) -> Point:
    gaps = row.get("gaps") or []
    token_time = sum(gaps) / max(len(gaps), (row.get("output_tokens") or 1) - 1) if gaps else None
    return _point(where, row, _number(where, row, "ttft"), token_time)


def _is_isolated(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    return not any(
        other is not row and other["sent"] < row["ended"] and row["sent"] < other["ended"]
        for other in rows
        if other.get("outcome") != "skipped"
    )


def _point(where: str, values: Mapping[str, Any], ttft: float, token_time: float | None) -> Point:
    prompt, cached = _number(where, values, "prompt_tokens"), _number(where, values, "cached_tokens", 0)
    if not 0 <= cached < prompt:
        raise ConfigError(f"{where}: {cached:g} of {prompt:g} prompt tokens are cached, at least one must be computed")
    if ttft <= 0:
        raise ConfigError(f"{where}: the first token came after {1000 * ttft:g} ms, must be above 0")
    output = _number(where, values, "output_tokens", 1)
    return Point(int(prompt), int(cached), ttft, max(1, int(output)), token_time or None)


def _number(where: str, values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = values.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise ConfigError(f"{where}: {name} is {value!r}, must be a number")
    return value


Array = NDArray[np.float64]
NAMES = ("compute_efficiency", "memory_efficiency", "overhead")
MAX_RATIOS = 64
ROUNDS = 8
HUBER_LIMIT = 1.345 * 1.4826  # median errors from which on a point weighs less (Huber's constant for normal errors)
MIN_SINGULAR_VALUE = 1e-3  # normalised; columns with a smaller one cannot be distinguished


@dataclass(frozen=True, slots=True)
class Observation:
    """Consecutive steps, and the seconds that they took."""

    what: str  # "first token" | "later token"
    point: Point
    loads: tuple[Load, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """A device with fitted parameters, and the quality of the fit."""

    device: Device
    deviations: tuple[float, float, float]  # standard errors of the two efficiencies and the overhead
    kept: tuple[str, ...]  # undetermined parameters: unchanged, or an overhead of 0
    r2: float  # of seconds
    observations: tuple[Observation, ...]
    predicted: tuple[float, ...]  # seconds, of each

    @property
    def errors(self) -> tuple[float, ...]:
        """Relative errors: 0.1 is predicted a tenth too long."""
        return tuple(p / o.seconds - 1 for p, o in zip(self.predicted, self.observations, strict=True))

    @property
    def median_error(self) -> float:
        """Median of the absolute relative errors."""
        return float(np.median(np.abs(self.errors)))


def observe(points: Sequence[Point], tokens_per_step: int) -> list[Observation]:
    """Return for each point the prefill before its first token, and a step in the middle of its answer."""
    found: list[Observation] = []
    for point in points:
        found.append(Observation("first token", point, prefill_loads(point, tokens_per_step), point.ttft))
        if point.token_time is not None:
            middle = point.prompt_tokens + point.output_tokens // 2
            row = Load(rows=1, kv_tokens=middle, states=1, logits=1)
            found.append(Observation("later token", point, (row,), point.token_time))
    return found


def prefill_loads(point: Point, tokens_per_step: int) -> tuple[Load, ...]:
    """Return the loads of a prompt's legs, one a step; the first restores a checkpoint if anything was cached."""
    loads = []
    for start in range(point.cached_tokens, point.prompt_tokens, tokens_per_step):
        end = min(start + tokens_per_step, point.prompt_tokens)
        restored = start == point.cached_tokens > 0
        squares = end * end - start * start
        loads.append(Load(end - start, squares, start, 1, states=1 + restored, logits=int(end == point.prompt_tokens)))
    return tuple(loads)


def fit(profile: Profile, device: Device, observations: Sequence[Observation]) -> Fitted:
    """Fit the efficiencies and the overhead of `device` to the observations.

    Raises ConfigError if there are not more observations than parameters.
    """
    if len(observations) <= len(NAMES):
        raise ConfigError(f"{len(observations)} measured times for {len(NAMES)} parameters, one more is needed")
    cost = StepCost(profile, replace(device, compute_efficiency=1.0, memory_efficiency=1.0, overhead=0.0))
    system = _System(cost, observations)
    start = np.array([1 / device.compute_efficiency, 1 / device.memory_efficiency, device.overhead])
    best = min((system.solve(ratio, start) for ratio in system.ratios()), key=lambda one: system.loss(one.values))
    x, z, overhead = map(float, best.values)
    predicted = system.predict(best.values)
    spread = float(((system.y - system.y.mean()) ** 2).sum())
    deviations = best.deviations()
    return Fitted(
        device=replace(device, compute_efficiency=1 / x, memory_efficiency=1 / z, overhead=overhead),
        deviations=(float(deviations[0]) / x**2, float(deviations[1]) / z**2, float(deviations[2])),
        kept=tuple(name for name, yes in zip(NAMES, best.told, strict=True) if not yes),
        r2=1 - float(((system.y - predicted) ** 2).sum()) / spread if spread else 0.0,
        observations=tuple(observations),
        predicted=tuple(map(float, predicted)),
    )


@dataclass(frozen=True, slots=True)
class _Solution:
    """Parameters at one ratio, and whether the observations determine each."""

    values: Array  # x, z, overhead
    told: list[bool]  # whether the observations determine the value; otherwise it is unchanged
    columns_N3: Array  # relative change of each observation's seconds with each value
    error_N: Array

    def deviations(self) -> Array:
        """Standard errors of the values, 0 for those that were kept (Huber 1981, section 7.6).

        They ignore that the sides of the steps were chosen by the same observations.
        """
        columns = self.columns_N3[:, self.told]
        far = HUBER_LIMIT * float(np.median(np.abs(self.error_N)))
        near = np.minimum(np.abs(self.error_N), far)
        variance = float(near @ near) / (len(near) - columns.shape[1]) / max(0.5, float(np.mean(near < far))) ** 2
        found = np.zeros(len(self.values))
        found[self.told] = np.sqrt(variance * np.diag(np.linalg.inv(columns.T @ columns)))
        return found


class _System:
    """Observations as arrays: N observations, S steps in total."""

    def __init__(self, cost: StepCost, observations: Sequence[Observation]) -> None:
        sides = [cost.sides(load) for one in observations for load in one.loads]
        self.compute_S, self.memory_S = (np.array(side) for side in zip(*sides, strict=True))
        self.of_S = np.repeat(np.arange(len(observations)), [len(one.loads) for one in observations])
        self.steps_N = np.bincount(self.of_S).astype(np.float64)
        fixed = [sum(cost.seconds(load) - max(cost.sides(load)) for load in one.loads) for one in observations]
        self.fixed_N = np.array(fixed)
        self.y = np.array([one.seconds for one in observations])

    def ratios(self) -> list[float]:
        """Return values of x/z between which steps change between compute-bound and memory-bound."""
        edges = np.unique(self.memory_S / self.compute_S)
        edges = np.concatenate(([edges[0] / 2], np.sqrt(edges[1:] * edges[:-1]), [edges[-1] * 2]))
        picked = np.linspace(0, len(edges) - 1, min(len(edges), MAX_RATIOS)).astype(int)
        return [float(edges[at]) for at in np.unique(picked)]

    def solve(self, ratio: float, start: Array) -> _Solution:
        """Solve by least squares with x/z = `ratio`, leaving out values that are undetermined or would be negative."""
        bound = ratio * self.compute_S > self.memory_S
        sums = [self._sum(self.compute_S * bound), self._sum(self.memory_S * ~bound), self.steps_N]
        columns_N3 = np.stack(sums, axis=1)
        told = [bool(column.any()) for column in columns_N3.T]
        if not _distinct((columns_N3 / self.y[:, None])[:, told]):
            told[2] = False  # a step's overhead cannot be distinguished from reading its weights
        seconds_N, weight_N = self.y, np.ones(len(self.y))
        for _ in range(ROUNDS):
            target_N = 1 + np.log(self.y / seconds_N) - self.fixed_N / seconds_N
            values, left = _positive(columns_N3 * (weight_N / seconds_N)[:, None], target_N * weight_N, start, told)
            seconds_N = columns_N3 @ values + self.fixed_N
            error_N = np.log(seconds_N / self.y)
            weight_N = _weights(error_N)
        return _Solution(values, left, columns_N3 / seconds_N[:, None], error_N)

    def predict(self, values: Array) -> Array:
        """Return the predicted seconds of each observation."""
        sides_S: Array = np.maximum(values[0] * self.compute_S, values[1] * self.memory_S)
        seconds_N: Array = self._sum(sides_S) + values[2] * self.steps_N + self.fixed_N
        return seconds_N

    def loss(self, values: Array) -> float:
        return float(np.abs(np.log(self.predict(values) / self.y)).sum())

    def _sum(self, values_S: Array) -> Array:
        return np.bincount(self.of_S, weights=values_S).astype(np.float64)


def _weights(error_N: Array) -> Array:
    """Return the square roots of Huber's weights."""
    far = HUBER_LIMIT * float(np.median(np.abs(error_N)))
    weight_N: Array = np.sqrt(far / np.maximum(np.abs(error_N), far)) if far else np.ones(len(error_N))
    return weight_N


def _positive(columns: Array, target: Array, start: Array, told: list[bool]) -> tuple[Array, list[bool]]:
    """Solve linear least squares with positive values; others keep `start`'s value, an overhead becomes 0.

    Returns the values, and which of them the observations determine.
    """
    values, told = start.copy(), list(told)
    while any(told):
        kept = [not one for one in told]
        rest = target - columns[:, kept] @ values[kept]
        values[told] = np.linalg.lstsq(columns[:, told], rest, rcond=None)[0]
        worst = int(np.argmin(np.where(told, values, np.inf)))
        if values[worst] > 0:
            break
        values[worst], told[worst] = 0.0 if worst == 2 else start[worst], False
    return values, told


def _distinct(columns: Array) -> bool:
    """Return whether the columns are linearly independent."""
    scaled = columns / np.linalg.norm(columns, axis=0)
    return bool(np.linalg.svd(scaled, compute_uv=False)[-1] > MIN_SINGULAR_VALUE)
