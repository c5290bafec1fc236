"""Weights as small integers with scales: their values, and rows cut out of them and joined."""

from dataclasses import replace

import pytest
import torch

from headwater.mixers.linear import Linear
from headwater.mixers.numerics import Numerics
from headwater.mixers.quantised import Quantised, joined
from headwater.mixers.weights import format_of


def weight(n_out=6, n_in=128, groups=4, **fields):
    codes = torch.randint(0, 16, (n_out, n_in), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (n_out, groups), dtype=torch.uint8)
    return Quantised(codes, 4, torch.rand(n_out, groups).half(), zeros, **fields)


def test_a_value_is_its_code_less_zero_times_scale_less_minimum():
    some = weight(minimum_NX=torch.rand(6, 4).half())
    of = [
        [
            (float(some.code_NK[n, k]) - float(some.zero_NX[n, k // 32])) * float(some.scale_NX[n, k // 32])
            - float(some.minimum_NX[n, k // 32])
            for k in range(128)
        ]
        for n in range(6)
    ]
    torch.testing.assert_close(some.values(), torch.tensor(of), rtol=1e-5, atol=1e-5)


def test_codes_of_a_table_stand_for_its_numbers():
    table = tuple(range(3, 243, 15))
    some = replace(weight(minimum_NX=torch.rand(6, 4)), table=table)
    numbers = torch.tensor(table, dtype=torch.uint8)[some.code_NK.int()]
    assert torch.equal(some.values(), replace(some, code_NK=numbers, bits=8, table=None).values())
    with pytest.raises(ValueError, match="do not join"):
        joined([some, replace(some, table=table[::-1])])
    with pytest.raises(ValueError, match="15 numbers for codes of 4 bits, must be 16 for at most 4"):
        replace(some, table=table[1:])


def test_groups_of_groups_scale_scales():
    inner = torch.randint(0, 64, (6, 4), dtype=torch.uint8)
    outer = torch.rand(6, 2).half()
    some = replace(weight(), scale_NX=inner, outer_scale_NS=outer)
    plain = replace(
        weight(), code_NK=some.code_NK, zero_NX=some.zero_NX, scale_NX=inner * outer.float()[:, [0, 0, 1, 1]]
    )
    assert torch.equal(some.values(), plain.values())


def test_rows_keep_their_values():
    some = weight(minimum_NX=torch.rand(6, 4))
    order = torch.tensor([3, 0, 5])
    assert torch.equal(some.rows(order).values(), some.values()[order])
    first, second = some.split([4, 2])
    assert torch.equal(joined([first, second]).values(), some.values())
    with pytest.raises(ValueError, match=r"\(4, 32\), \(4, 64\)"):
        joined([some, weight(groups=2)])


def test_product_gathers_inputs_in_the_order_of_groups():
    plain, order_K = weight(n_out=70), torch.randperm(128)
    some = replace(plain, order_K=order_K)
    assert torch.equal(some.values()[:, order_K], plain.values())
    ordered, linear = (Linear(of, numerics=Numerics("tiled")) for of in (plain, some))
    for x_RK in (torch.randn(1, 128), torch.randn(9, 200)[:, :128]):
        assert torch.equal(linear(x_RK, 0), ordered(x_RK[:, order_K], 0))
    assert torch.equal(linear.rows(torch.tensor([69, 3])), some.values()[[69, 3]])
    assert format_of(some) != format_of(plain)


def test_groups_must_divide_the_inputs():
    with pytest.raises(ValueError, match="128 inputs cannot be divided into 3 groups of a multiple of 8"):
        weight(groups=3)


def test_bytes_are_those_of_packed_codes():
    assert weight().bytes == 6 * 128 // 2 + 6 * 4 * 2 + 6 * 4
