"""A fit recovers the efficiencies with which its times were generated."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import ConfigError
from headwater.lab.cost import DEVICES, Device, StepCost
from headwater.lab.fit import Point, fit, observe, prefill_loads, read_points
from headwater.models.profiles import PROFILES

QWEN = PROFILES["qwen3.5-9b"]
TRUE = replace(DEVICES["h100"], compute_efficiency=0.43, memory_efficiency=0.71, overhead=0.0031)
STEP = 2048


def points(device: Device, noise: float, decode: bool = True) -> list[Point]:
    draw = random.Random(0)
    cost = StepCost(QWEN, device)
    made = []
    for _ in range(60):
        prompt = draw.randrange(200, 30_000)
        cached = draw.choice([0, 0, prompt // 2, prompt - draw.randrange(8, 100)])
        bare = Point(prompt, cached, 1.0, output_tokens=100, token_time=1.0 if decode else None)
        seconds = [sum(map(cost.seconds, one.loads)) * draw.gauss(1, noise) for one in observe([bare], STEP)]
        made.append(replace(bare, ttft=seconds[0], token_time=seconds[1] if decode else None))
    return made


def test_parameters_are_recovered_from_exact_times() -> None:
    found = fit(QWEN, DEVICES["h100"], observe(points(TRUE, noise=0), STEP))
    assert found.kept == ()
    assert found.device.compute_efficiency == pytest.approx(0.43, rel=1e-6)
    assert found.device.memory_efficiency == pytest.approx(0.71, rel=1e-6)
    assert found.device.overhead == pytest.approx(0.0031, rel=1e-6)
    assert found.r2 == pytest.approx(1)
    assert max(map(abs, found.errors)) < 1e-6


def test_parameters_are_recovered_under_noise() -> None:
    """Within three standard errors; what one row's decode tells of memory and overhead is mostly their sum."""
    found = fit(QWEN, DEVICES["h100"], observe(points(TRUE, noise=0.02), STEP))
    fitted, true = found.device, TRUE
    for value, expected, deviation in zip(
        (fitted.compute_efficiency, fitted.memory_efficiency, fitted.overhead),
        (true.compute_efficiency, true.memory_efficiency, true.overhead),
        found.deviations,
        strict=True,
    ):
        assert 0 < deviation < expected
        assert abs(value - expected) < 3 * deviation
    assert fitted.compute_efficiency == pytest.approx(0.43, rel=0.05)
    assert 0.99 < found.r2 < 1
    assert found.median_error < 0.02


def test_points_far_off_hardly_count() -> None:
    """One in ten took ten times as long: another program was in the way."""
    measured = [replace(p, ttft=p.ttft * (10 if i % 10 == 0 else 1)) for i, p in enumerate(points(TRUE, noise=0.01))]
    found = fit(QWEN, DEVICES["h100"], observe(measured, STEP)).device
    assert found.compute_efficiency == pytest.approx(0.43, rel=0.03)


def test_parameters_that_points_do_not_determine_are_kept() -> None:
    """Only long prefills are all bound by compute, and show nothing of the memory."""
    long = [one for one in points(TRUE, 0, decode=False) if one.prompt_tokens - one.cached_tokens > 8 * STEP]
    assert len(long) > 5
    found = fit(QWEN, DEVICES["h100"], observe([replace(one, cached_tokens=0) for one in _cut(long)], STEP))
    assert "memory_efficiency" in found.kept
    assert found.device.memory_efficiency == DEVICES["h100"].memory_efficiency


def _cut(long: list[Point]) -> list[Point]:
    """Whole steps only, timed with the true device."""
    cost = StepCost(QWEN, TRUE)
    whole = [Point(one.prompt_tokens // STEP * STEP, 0, 1.0) for one in long]
    return [replace(one, ttft=sum(map(cost.seconds, prefill_loads(one, STEP)))) for one in whole]


def test_no_parameter_becomes_negative() -> None:
    """Times that fall with the work can only be explained by overhead."""
    odd = [Point(1000 * n, 0, 1 / n) for n in range(1, 9)]
    device = fit(QWEN, DEVICES["h100"], observe(odd, STEP)).device
    assert device.compute_efficiency > 0
    assert device.memory_efficiency > 0
    assert device.overhead >= 0


def test_a_prefill_is_cut_into_steps_and_restores_once() -> None:
    legs = prefill_loads(Point(5000, 500, 1.0), STEP)
    assert [(leg.prefix_tokens, leg.prefill_tokens, leg.states, leg.logits) for leg in legs] == [
        (500, 2048, 2, 0),
        (2548, 2048, 1, 0),
        (4596, 404, 1, 1),
    ]
    assert sum(leg.prefill_squares for leg in legs) == 5000**2 - 500**2


def test_too_few_times_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 measured times for 3 parameters, one more is needed"):
        fit(QWEN, DEVICES["h100"], observe([Point(100, 0, 1.0), Point(200, 0, 1.0)], STEP))


def test_points_are_read_from_a_list(tmp_path: Path) -> None:
    file = tmp_path / "points.json"
    file.write_text('[{"prompt_tokens": 100, "cached_tokens": 64, "ttft_ms": 12.5, "itl_ms": 3, "output_tokens": 7}]')
    assert read_points(file) == ([Point(100, 64, 0.0125, 7, 0.003)], 0)


def row(**more: Any) -> dict[str, Any]:
    values = {"outcome": "ok", "sent": 0.0, "ended": 1.0, "ttft": 0.5, "gaps": [0.1, 0.3], "prompt_tokens": 50}
    return values | {"cached_tokens": None, "output_tokens": 5} | more


def test_only_isolated_requests_of_a_bench_report_count(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    rows = [
        row(),
        row(sent=1.0, ended=3.0),
        row(sent=2.0, ended=4.0),
        row(sent=5.0, ended=6.0, outcome="error"),
        row(sent=7.0, ended=8.0, cached_tokens=40),
    ]
    file.write_text(json.dumps({"phases": [{"rows": rows}, {"rows": [row(gaps=[])]}]}))
    found, left_out = read_points(file)
    assert found == [Point(50, 0, 0.5, 5, 0.1), Point(50, 40, 0.5, 5, 0.1), Point(50, 0, 0.5, 5, None)]
    assert left_out == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "neither a list of points nor a report"),
        ("[1]", "point 1 is 1, must be an object"),
        ("[", "points.json: Expecting value"),
        ('{"phases": [{"rows": [1]}]}', "not a report of `headwater bench serve`"),
        ('[{"prompt_tokens": 9, "ttft_ms": "x"}]', "point 1: ttft_ms is 'x', must be a number"),
        ('[{"prompt_tokens": 9, "cached_tokens": 9, "ttft_ms": 1}]', "9 of 9 prompt tokens are cached"),
        ('[{"prompt_tokens": 9, "ttft_ms": 0}]', "came after 0 ms, must be above 0"),
    ],
)
def test_points_that_cannot_be_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "points.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_points(tmp_path / "points.json")
