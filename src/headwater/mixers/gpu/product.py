"""Products of decoding rows in Triton: any number of rows in one launch, with the activation and the factor after them.

A program multiplies 16 rows, filled up with zeros, by a block of outputs, and adds up inputs in order, block by block.
So a row's bits depend only on the row. Each weight is read once from memory for 16 rows, which takes most of the time.

R rows, K inputs, N outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headwater.mixers.gpu import dense
from headwater.mixers.gpu.pointwise import activated
from headwater.mixers.products import TorchProduct

HEIGHT = 16  # rows of a program, the fewest that tensor cores multiply
MIN_LONG_INPUTS = 2048  # from which on a program reads more of a row at a time
SHORT_BYTES, LONG_BYTES = 512, 1024  # of a row
STAGES, WARPS = 3, 2


@triton.jit(
    do_not_specialize=["n_rows", "factor_row", "out_row"], do_not_specialize_on_alignment=["bias", "factor", "out"]
)
def _product(
    x, weight, bias, factor, out, n_rows, n_in, n_out, factor_row, out_row,
    then: tl.constexpr, has_bias: tl.constexpr, has_factor: tl.constexpr, even: tl.constexpr,
    height: tl.constexpr, outputs: tl.constexpr, inputs: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * height + tl.arange(0, height)
    n = tl.program_id(1) * outputs + tl.arange(0, outputs)
    k = tl.arange(0, inputs)
    x_row = x + row[:, None].to(tl.int64) * n_in
    w_row = weight + n[:, None].to(tl.int64) * n_in
    in_x, in_w = (row < n_rows)[:, None], (n < n_out)[:, None]
    total = tl.zeros((height, outputs), tl.float32)
    for first in range(0, n_in, inputs):
        at = first + k[None, :]
        if even:
            x_RK, w_NK = tl.load(x_row + at, mask=in_x, other=0.0), tl.load(w_row + at, mask=in_w, other=0.0)
        else:
            x_RK = tl.load(x_row + at, mask=in_x & (at < n_in), other=0.0)
            w_NK = tl.load(w_row + at, mask=in_w & (at < n_in), other=0.0)
        total = tl.dot(x_RK, tl.trans(w_NK), total, input_precision="ieee")
    if has_bias:
        total += tl.load(bias + n, mask=n < n_out, other=0.0).to(tl.float32)[None, :]
    inside = in_x & (n < n_out)[None, :]
    y = total.to(out.dtype.element_ty)
    if then == "swish":
        y = activated(y.to(tl.float32), "silu").to(out.dtype.element_ty)
    elif then != "none":
        y = activated(y.to(tl.float32), then).to(out.dtype.element_ty)
    if has_factor:
        y = y * tl.load(factor + row[:, None].to(tl.int64) * factor_row + n[None, :], mask=inside, other=0.0)
    tl.store(out + row[:, None].to(tl.int64) * out_row + n[None, :], y, mask=inside)


@triton.jit(do_not_specialize=["n_rows"], do_not_specialize_on_alignment=["out"])
def _opened_product(
    x, gate, weight, out, n_rows, n_in, n_out,
    even: tl.constexpr, height: tl.constexpr, outputs: tl.constexpr, inputs: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * height + tl.arange(0, height)
    n = tl.program_id(1) * outputs + tl.arange(0, outputs)
    k = tl.arange(0, inputs)
    x_row = x + row[:, None].to(tl.int64) * n_in
    w_row = n[:, None].to(tl.int64) * n_in
    in_x, in_w = (row < n_rows)[:, None], (n < n_out)[:, None]
    total = tl.zeros((height, outputs), tl.float32)
    opened = tl.zeros((height, outputs), tl.float32)
    for first in range(0, n_in, inputs):
        at = first + k[None, :]
        if even:
            x_RK = tl.load(x_row + at, mask=in_x, other=0.0)
            g_NK = tl.load(gate + w_row + at, mask=in_w, other=0.0)
            w_NK = tl.load(weight + w_row + at, mask=in_w, other=0.0)
        else:
            x_RK = tl.load(x_row + at, mask=in_x & (at < n_in), other=0.0)
            g_NK = tl.load(gate + w_row + at, mask=in_w & (at < n_in), other=0.0)
            w_NK = tl.load(weight + w_row + at, mask=in_w & (at < n_in), other=0.0)
        opened = tl.dot(x_RK, tl.trans(g_NK), opened, input_precision="ieee")
        total = tl.dot(x_RK, tl.trans(w_NK), total, input_precision="ieee")
    opened = activated(opened.to(out.dtype.element_ty).to(tl.float32), "silu").to(out.dtype.element_ty)
    to = out + row[:, None].to(tl.int64) * n_out + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty) * opened, mask=in_x & (n < n_out)[None, :])


class ProductOnGpu(TorchProduct):
    """A weight in the dtype of products: torch multiplies prompts' rows, a kernel those of decoding sequences."""

    outputs = 16  # of a program

    def answers_into(self, out_RN: Tensor, x_RK: Tensor, then: str, factor_RN: Tensor | None) -> None:
        """Write then(x Wᵀ + b) · factor; neighbours in rows of the result and the factor are adjacent."""
        weight_NK, bias_N = self._whole, self.bias_N
        x_RK = dense(x_RK.to(self.computes_in))
        n_out, n_in = weight_NK.shape
        factor_row = 0 if factor_RN is None else factor_RN.stride(0)
        _product[self._programs(x_RK)](
            x_RK, weight_NK, weight_NK if bias_N is None else bias_N, out_RN if factor_RN is None else factor_RN,
            out_RN, len(x_RK), n_in, n_out, factor_row, out_RN.stride(0),
            then=then, has_bias=bias_N is not None, has_factor=factor_RN is not None,
            **self._tile(LONG_BYTES if n_in >= MIN_LONG_INPUTS else SHORT_BYTES),
        )  # fmt: skip

    def opened(self, gate: ProductOnGpu, x_RK: Tensor) -> Tensor | None:
        """Return (x Wᵀ) · silu(x Gᵀ) of decoding rows by one kernel; None if a product has a bias."""
        if self.bias_N is not None or gate.bias_N is not None:
            return None
        x_RK = dense(x_RK.to(self.computes_in))
        n_out, n_in = self._whole.shape
        out_RN = x_RK.new_empty(len(x_RK), n_out, dtype=self.dtype)
        _opened_product[self._programs(x_RK)](
            x_RK, gate._whole, self._whole, out_RN, len(x_RK), n_in, n_out, **self._tile(SHORT_BYTES)
        )
        return out_RN

    @property
    def _whole(self) -> Tensor:
        assert isinstance(self.weight_NK, Tensor)
        return self.weight_NK

    def _programs(self, x_RK: Tensor) -> tuple[int, int]:
        return triton.cdiv(len(x_RK), HEIGHT), triton.cdiv(len(self._whole), self.outputs)

    def _tile(self, row_bytes: int) -> dict[str, int | bool]:
        """Return the constants of a kernel that reads `row_bytes` bytes of a row at a time."""
        n_in = self._whole.shape[1]
        inputs = min(row_bytes // self._whole.itemsize, max(16, triton.next_power_of_2(n_in)))
        shape = {"height": HEIGHT, "outputs": self.outputs, "inputs": inputs}
        return {"even": n_in % inputs == 0, "num_warps": WARPS, "num_stages": STAGES, **shape}
