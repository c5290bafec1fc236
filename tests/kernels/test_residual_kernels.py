"""Norms of the residual stream by a kernel: close to torch's, with bits that depend only on a row."""

import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed")

import numba

from headwater.kernels.compiling import use_threads
from headwater.mixers.activations import RMSNorm, StreamNorm
from headwater.mixers.cpu.stream import StreamNormOnCpu

ROWS, WIDTH = 70, 208
PAIRS = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]


def norms_of(width, dtype):
    norm = RMSNorm(torch.randn(width, generator=torch.Generator().manual_seed(1)), 1e-6, 1.0)
    return StreamNorm(norm, dtype), StreamNormOnCpu(norm, dtype)


def rows_of(width, stream, dtype):
    generator = torch.Generator().manual_seed(2)
    x, out = torch.randn(2, ROWS, width, generator=generator)
    return x.to(stream), out.to(dtype)


@pytest.mark.parametrize(("stream", "dtype"), PAIRS)
@pytest.mark.parametrize("width", [WIDTH, 75])
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_sums_and_norms_are_torchs(scale, width, stream, dtype):
    by_torch, by_kernel = norms_of(width, dtype)
    x, out = rows_of(width, stream, dtype)
    expected = x.clone()
    wanted = by_torch.after(expected, out, scale)
    got = by_kernel.after(x, out, scale)
    tolerance = 2e-6 if stream is dtype is torch.float32 else 2e-2
    assert (got.dtype, x.dtype) == (dtype, stream)
    torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(by_kernel(x), by_torch(x), rtol=tolerance, atol=tolerance)


def same_at_all_heights(norm, x, out):
    whole = x.clone()
    normed = norm.after(whole, out, 1.0)
    for n in (1, 2, 7, 16, 19, 20, ROWS):
        for at in (slice(0, n), slice(ROWS - n, ROWS)):
            rows = x[at].clone()
            if not (torch.equal(norm.after(rows, out[at], 1.0), normed[at]) and torch.equal(rows, whole[at])):
                return False
    return torch.equal(norm(whole), normed)


class Leaning(StreamNormOnCpu):
    """Control: a norm that depends on the number of rows."""

    def after(self, x_NC, out_NC, scale):
        return super().after(x_NC, out_NC, scale * (1 + 1e-6 * (len(x_NC) == 7)))


@pytest.mark.parametrize(("stream", "dtype"), PAIRS)
def test_row_has_equal_bits_at_all_heights_and_with_separate_sum(stream, dtype):
    x, out = rows_of(WIDTH, stream, dtype)
    norm = norms_of(WIDTH, dtype)[1]
    assert same_at_all_heights(norm, x, out)
    assert stream is torch.bfloat16 or not same_at_all_heights(Leaning(norm.norm, dtype), x, out)


def test_threads_change_no_bit():
    x, out = rows_of(WIDTH, torch.float32, torch.float32)
    norm, before, normed = norms_of(WIDTH, torch.float32)[1], numba.get_num_threads(), []
    for n in (1, 2, 3):
        use_threads(n)
        normed.append(norm.after(x.clone(), out, 1.0))
    use_threads(before)
    assert torch.equal(normed[0], normed[1])
    assert torch.equal(normed[0], normed[2])
