"""Powers of two in whole vectors: exact to the last bit but one, and the same wherever an element stands."""

import pytest
import torch

from headwater.mixers.activations import PIECE, empty_vectors, exp2_


def powers(x_N: torch.Tensor) -> torch.Tensor:
    out_N, vectors = empty_vectors(len(x_N))
    out_N.copy_(x_N)
    exp2_(vectors)
    return out_N


def exponents(n: int) -> torch.Tensor:
    return -40 * torch.rand(n, generator=torch.Generator().manual_seed(0))


def test_powers_equal_float64() -> None:
    x_N = exponents(10_000)
    wanted_N = x_N.double().exp2()
    assert ((powers(x_N) - wanted_N).abs() / wanted_N).max() < 1.2e-7


def test_ends() -> None:
    x_N = torch.tensor([0.0, -0.0, -1e4, -1e30, float("-inf")])
    assert powers(x_N).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_of_an_element_do_not_depend_on_position_or_count(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x_N = exponents(2 * PIECE + 77)
        whole_N = powers(x_N)
        for n in (*range(1, 300), PIECE // 2 + 1, PIECE - 1, PIECE + 1, PIECE + 33, 2 * PIECE):
            assert torch.equal(powers(x_N[:n]), whole_N[:n]), n
            assert torch.equal(powers(x_N[-n:]), whole_N[-n:]), n
    finally:
        torch.set_num_threads(before)


def test_memory_is_whole_vectors_of_which_the_shape_is_the_beginning() -> None:
    part_SNC, vectors = empty_vectors(3, 7, 5)
    vectors.fill_(2.0)
    assert part_SNC.shape == (3, 7, 5)
    assert part_SNC.data_ptr() == vectors.data_ptr()
    assert len(vectors) % 128 == 0
