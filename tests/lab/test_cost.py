"""Costs of steps, and their fit to measured ones."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.lab.cost import DEVICES, Device, Load, StepCost, load_device, sum_of_larger
from headwater.lab.fit import Point, fit, observe, prefill_loads, read_points
from headwater.models.profiles import PROFILES

QWEN = PROFILES["qwen3.5-9b"]
H100 = replace(DEVICES["h100"], compute_efficiency=0.5, memory_efficiency=0.8, overhead=0.001)


def prefill(start: int, end: int) -> Load:
    squares = end * end - start * start
    return Load(end - start, squares, prefix_tokens=start, legs=1, states=1, logits=1)


def test_a_long_prefill_takes_its_flops() -> None:
    start, end = 1000, 9000
    flops = sum(QWEN.flops_by_kind(start, end).values())
    expected = 0.001 + flops / (0.5 * 989.5e12)
    assert StepCost(QWEN, H100).seconds(prefill(start, end)) == pytest.approx(expected, rel=1e-12)


def test_a_decode_step_takes_its_bytes() -> None:
    rows, kv = 4, 20_000
    load = Load(rows=rows, kv_tokens=kv, states=rows, logits=rows)
    bytes_ = QWEN.weight_bytes_read(rows) + QWEN.head_bytes
    bytes_ += (kv + rows) * QWEN.kv_bytes_per_token + 2 * rows * QWEN.checkpoint_bytes
    assert StepCost(QWEN, H100).seconds(load) == pytest.approx(0.001 + bytes_ / (0.8 * 3.35e12), rel=1e-12)


def test_a_decode_step_reads_weights_as_they_are_held() -> None:
    load = Load(rows=1, states=1)
    for name in ("qwen3.5-9b", "qwen3-next-80b-a3b"):
        sides = []
        for weights in ("auto", "int8", "int4"):
            profile = replace(PROFILES[name], weights=weights)
            compute, memory = StepCost(profile, H100).sides(load)
            others = profile.kv_bytes_per_token + 2 * profile.checkpoint_bytes
            assert memory == pytest.approx((profile.weight_bytes_read(1) + others) / (0.8 * 3.35e12), rel=1e-12)
            sides.append((compute, -memory))
        assert sides == sorted(sides)
        assert len({compute for compute, _ in sides}) == 1


def test_rows_cost_as_much_as_legs_of_one_token() -> None:
    cost = StepCost(QWEN, H100)
    row = Load(rows=1, kv_tokens=5000, states=1, logits=1)
    assert cost.sides(row) == pytest.approx(cost.sides(prefill(5000, 5001)), rel=1e-12)


def test_a_chunked_prefill_computes_as_much_and_reads_weights_more_often() -> None:
    cost = StepCost(QWEN, replace(H100, overhead=0.0))
    whole, first, second = (replace(prefill(*leg), logits=0) for leg in ((0, 8192), (0, 4096), (4096, 8192)))
    assert cost.sides(first)[0] + cost.sides(second)[0] == pytest.approx(cost.sides(whole)[0], rel=1e-12)
    assert cost.sides(first)[1] + cost.sides(second)[1] > cost.sides(whole)[1]


@given(st.integers(1, 200), st.integers(0, 10**6), st.integers(1, 50))
def test_many_decode_steps_cost_the_sum_of_single_ones(rows: int, kv: int, steps: int) -> None:
    for device in (H100, replace(H100, flops16=2e12), replace(H100, flops16=1e12, memory_efficiency=0.01)):
        cost = StepCost(QWEN, device)
        at = [Load(rows=rows, kv_tokens=kv + i * rows, states=rows, logits=rows) for i in range(steps)]
        assert cost.seconds(at[0], steps) == pytest.approx(math.fsum(map(cost.seconds, at)), rel=1e-9)


small = st.integers(-20, 20)


@given(st.tuples(small, small), st.tuples(small, small), st.integers(1, 30))
def test_the_sum_of_the_larger_line_is_exact(one: tuple[int, int], other: tuple[int, int], n: int) -> None:
    expected = sum(max(one[0] + one[1] * i, other[0] + other[1] * i) for i in range(n))
    assert sum_of_larger(one, other, n) == expected


def test_a_step_of_few_tokens_reads_few_experts() -> None:
    moe = PROFILES["qwen3.5-35b-a3b"]
    cost = StepCost(moe, H100)
    for tokens in (1, 7, 100, 100_000):
        load = Load(prefill_tokens=tokens)
        kv = tokens * moe.kv_bytes_per_token
        expected = (moe.weight_bytes_read(tokens) + kv) / (0.8 * 3.35e12)
        assert cost.sides(load)[1] == pytest.approx(expected, rel=1e-9)


def test_fp8_weights_double_the_speed_of_all_but_attention() -> None:
    whole, half = (StepCost(PROFILES[name], H100) for name in ("qwen3-next-80b-a3b", "qwen3-next-80b-a3b-fp8"))
    tokens, pairs = Load(prefill_tokens=1000), Load(prefill_squares=10**9)
    assert half.sides(tokens)[0] == pytest.approx(whole.sides(tokens)[0] / 2)
    assert half.sides(pairs)[0] == whole.sides(pairs)[0]


def test_a_checkpoint_is_read_and_written() -> None:
    cost = StepCost(QWEN, H100)
    moved = cost.sides(Load(states=3))[1] - cost.sides(Load())[1]
    assert moved == pytest.approx(3 * 2 * 51_511_296 / (0.8 * 3.35e12))


def test_devices_in_parallel_share_the_work_and_add_up_their_outputs() -> None:
    alone, four = StepCost(QWEN, H100), StepCost(replace(QWEN, tensor_parallel=4), H100)
    load = prefill(0, 8192)
    assert four.sides(load) == pytest.approx([side / 4 for side in alone.sides(load)])
    ring = 2 * 3 / 4 * 8192 * QWEN.hidden_size * 2 * 64 / 450e9  # 64 sublayers in bfloat16
    assert four.seconds(load) == pytest.approx(0.001 + max(four.sides(load)) + ring)
    with pytest.raises(ConfigError, match="4 devices in parallel, but cpu has no link"):
        StepCost(replace(QWEN, tensor_parallel=4), DEVICES["cpu"])


@pytest.mark.parametrize("source", ['a "quoted" \\ source', "R² 0.98 of \U0001f680", "two\nlines\x7f"])
def test_a_device_is_read_as_it_was_written(source: str, tmp_path: Path) -> None:
    device = replace(H100, name="mine", source=source)
    (tmp_path / "mine.toml").write_text(device.as_toml(), encoding="utf-8")
    assert load_device(str(tmp_path / "mine.toml")) == device
    assert load_device("h100") is DEVICES["h100"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 3", "name is 3, must be text"),
        ("bandwidth = -1.0", "bandwidth is -1.0, must be above 0"),
        ("bandwidth = nan", "bandwidth is nan, must be above 0"),
        ("overhead = -0.1", "overhead is -0.1, must be at least 0"),
        ('link = "fast"', "link is 'fast', must be a number"),
        ("speed = 1.0", "'speed' is not one of name, flops32"),
        ('name = "x"', "missing 5 required positional arguments"),
        ("name = ", "mine.toml: "),
    ],
)
def test_invalid_device_file_is_an_error_with_its_reason(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_device(str(tmp_path / "mine.toml"))


def test_an_unknown_device_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'h900' is neither a file nor a device of h100, h200, a100, h20, l4, cpu"):
        load_device("h900")


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
