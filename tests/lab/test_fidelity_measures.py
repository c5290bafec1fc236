"""Measures of how far tensors and distributions are apart."""

from __future__ import annotations

import math

import pytest
import torch

from headwater.lab.fidelity.figures import Deviation, Distance, MeanFidelity, Measured, kept_table, means_table
from headwater.lab.fidelity.measures import deviation, distance, divergence
from headwater.lab.fidelity.prompts import Prompt
from headwater.request import Span


def test_distance_has_a_relative_error_and_an_angle() -> None:
    found = distance(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 0.0]]))
    assert found.error == pytest.approx(4 / 3)
    assert found.degrees == pytest.approx(math.degrees(math.atan2(4, 3)))
    assert distance(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])) == Distance(1.0, 0.0)
    assert distance(torch.tensor([-1.0]), torch.tensor([1.0])).degrees == pytest.approx(180)


def test_an_angle_of_a_billionth_is_seen() -> None:
    found = distance(torch.tensor([1.0, 1e-9], dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert found.degrees == pytest.approx(math.degrees(1e-9))


def test_equal_tensors_have_distance_zero_and_zeros_are_far() -> None:
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert distance(zeros, zeros) == distance(ones, ones) == Distance(0.0, 0.0)
    assert distance(zeros, ones) == Distance(1.0, 90.0)
    assert distance(ones, zeros) == Distance(math.inf, 90.0)


def test_divergence_is_in_nats_and_of_the_second_from_the_first() -> None:
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    assert divergence(p.log(), q.log()) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert divergence(p.log() + 7, p.log()) == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match="NaN"):
        divergence(torch.tensor([math.nan, 0.0]), p)


def test_deviations_are_means_over_heads_and_over_queries_that_see_the_key() -> None:
    """The prompt is a token of prefix and a segment of four tokens, whose ends are one token long."""
    whole = torch.tril(torch.ones(2, 5, 5)) / torch.arange(1, 6)[None, :, None]
    alone = torch.tril(torch.ones(2, 4, 4)) / torch.arange(1, 5)[None, :, None]
    found = deviation(Prompt((0,) * 5, (Span(1, 5),)), 1, whole, [alone])
    off = [1 / n - 1 / (n + 1) for n in range(1, 5)]  # of every key that the n-th query sees
    assert found.head == pytest.approx(sum(off) / 4)
    assert found.interior == pytest.approx((sum(off[1:]) + sum(off[2:])) / 5)
    assert found.tail == pytest.approx(off[3])


def test_means_leave_out_prompts_without_long_segments() -> None:
    assert Deviation.means([{}, {3: Deviation(1.0, 2.0, 3.0)}, {3: Deviation(3.0, 2.0, 1.0)}]) == {
        3: Deviation(2.0, 2.0, 2.0)
    }
    assert Deviation.means([{}]) == {}
    assert Distance.mean([Distance(1.0, 10.0), Distance(3.0, 20.0)]) == Distance(2.0, 15.0)


def test_kv_distances_are_means_over_prompts_with_reuse() -> None:
    far, none = Distance(1.0, 10.0), Distance(0.0, 0.0)
    some = Measured(100, 40, 0.5, False, {0: far}, {1: {"keys": far}})
    whole = Measured(100, 100, 0.0, True, {0: none}, {1: {"keys": none}})
    found = MeanFidelity.of([some, whole])
    assert (found.anew, found.divergence, found.same_first) == (0.7, 0.25, 0.5)
    assert found.states[0] == Distance(0.5, 5.0)
    assert found.kept[1]["keys"] == far
    assert MeanFidelity.of([whole]).kept[1]["keys"] == none


def test_method_without_reuse_shows_no_keys_and_values() -> None:
    far, none = Distance(1.0, 10.0), Distance(0.0, 0.0)
    some = MeanFidelity.of([Measured(100, 40, 0.5, False, {0: far}, {1: {"keys": far}})])
    whole = MeanFidelity.of([Measured(100, 100, 0.0, True, {0: none}, {1: {"keys": none}})])
    table = kept_table({"fast": some, "w32": whole})
    assert [list(column.cells) for column in table.columns] == [["1, keys"], ["1.00e+00, 10.00°"], ["–"]]


def test_a_model_without_recurrent_layers_has_no_last_state() -> None:
    one = MeanFidelity.of([Measured(100, 40, 0.5, False, {}, {1: {"keys": Distance(1.0, 10.0)}})])
    *_, last = means_table({"fast": one}).columns
    assert list(last.cells) == ["–"]
