"""A step's time: against sums worked out another way, and limits that are known."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.lab.cost import DEVICES, Load, StepCost, load_device, sum_of_larger
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
