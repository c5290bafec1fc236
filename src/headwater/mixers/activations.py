"""Activations, powers of two and RMS norms whose bits depend only on an element (or its row).

Torch's own fp32 `silu`, `sigmoid`, `softplus` and `exp2` have a vector body and a scalar tail that disagree in the last
bit, so a result would depend on the width and on how threads split it. `exp`, `log1p`, `rsqrt` and arithmetic do not:
the activations are composed of those. They compute in fp32 and round once, to the dtype of their input.

`exp2` takes a third of the time of `exp` (0.29 against 0.82 ns an element on AVX-512) and does not slow down if results
underflow (`exp`: 10 ns). So `exp2_` uses it, on whole vectors only: memory from `empty_vectors` comes in multiples of
them, and a call is split by threads only between vectors.

R rows, D and C widths, I intermediate width, N rows of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headwater.mixers.gpu import dense, has_kernels

Activation = Callable[[Tensor], Tensor]

VECTORS = 128  # elements: a stretch of this many is whole vectors, and so is its half
PIECE = 1 << 16  # elements of a call: torch cuts it in two at most, since it gives a thread at least half of that
LOG2_E = math.log2(math.e)
SIGMOID_SLOPE = 1.702  # of a clamped SwiGLU


def _one_plus_exp_neg(x: Tensor) -> Tensor:
    """Return 1 + e^-x in new fp32 memory: infinite if e^-x overflows, and dividing by it then gives 0."""
    return torch.neg(x.float()).exp_().add_(1.0)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    if has_kernels(x.device):
        return _on_gpu(x, "sigmoid")
    return _one_plus_exp_neg(x).reciprocal_().to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x)."""
    if has_kernels(x.device):
        return _on_gpu(x, "silu")
    denominator = _one_plus_exp_neg(x)
    return torch.div(x.float(), denominator, out=denominator).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), written so that neither end overflows: max(x, 0) + log1p(e^-|x|)."""
    if has_kernels(x.device):
        return _on_gpu(x, "softplus")
    x_f = x.float()
    return x_f.abs().neg_().exp_().log1p_().add_(x_f.clamp_min(0.0)).to(x.dtype)


def _on_gpu(x: Tensor, kind: str) -> Tensor:
    from headwater.mixers.gpu.pointwise import activate  # needs Triton

    return activate(x, kind)


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)² (So et al. 2021, section 3)."""
    return x.float().clamp_min(0.0).square_().to(x.dtype)


ACTIVATIONS = {"silu": silu, "relu2": relu2}  # by their names in config files


def limited_(opened_RI: Tensor, up_RI: Tensor, limit: float) -> Tensor:
    """min(opened, limit) · clamp(up, -limit, limit), in the memory of both (`SwigluStepAndMul` of vLLM)."""
    return up_RI.clamp_(-limit, limit).mul_(opened_RI.clamp_(max=limit))


def clamped_swiglu(gate_RI: Tensor, up_RI: Tensor, limit: float) -> Tensor:
    """(clamp(up, -limit, limit) + 1) · g · sigmoid(1.702 g) with g = min(gate, limit) (gpt-oss)."""
    limited_RI = gate_RI.float().clamp(max=limit)
    opened_RI = sigmoid(limited_RI * SIGMOID_SLOPE).mul_(limited_RI)
    return opened_RI.mul_(up_RI.float().clamp(-limit, limit).add_(1.0)).to(up_RI.dtype)


def gated_rms_norm_into(
    out_RD: Tensor, x_RD: Tensor, gate_RD: Tensor, weight_D: Tensor, eps: float, activation: Activation = silu
) -> None:
    """x / √(mean(x²) + eps) · w · activation(gate), in fp32: norm before gate, as in Gated DeltaNet. x is float32."""
    if has_kernels(x_RD.device) and x_RD.dim() == 3 and out_RD.is_contiguous():
        from headwater.mixers.gpu.norm import gated_norm_into  # needs Triton

        gated_norm_into(out_RD, x_RD, gate_RD, weight_D, eps, activation.__name__)
    else:
        out_RD.copy_((x_RD * inverse_rms(x_RD, eps)).mul_(weight_D).mul_(activation(gate_RD.float())))


def inverse_rms(x_RD: Tensor, eps: float) -> Tensor:
    """1 / √(mean(x²) + eps) over the last dimension of fp32 rows; R 1.

    The norm needs no squared copy of x: for 2,048 rows of 512 it takes 0.14 ms, `pow(2).mean()` takes 2.3 ms.
    """
    return _squares(x_RD).div_(x_RD.shape[-1]).add_(eps).rsqrt_()


def inverse_l2(x_RD: Tensor, eps: float = 1e-6) -> Tensor:
    """1 / √(Σx² + eps) over the last dimension of fp32 rows; R 1."""
    return _squares(x_RD).add_(eps).rsqrt_()


def _squares(x_RD: Tensor) -> Tensor:
    """Σx² over the last dimension of fp32 rows; R 1."""
    if has_kernels(x_RD.device):
        from headwater.mixers.gpu.norm import squares  # needs Triton

        return squares(x_RD)
    norm_R1: Tensor = torch.linalg.vector_norm(x_RD, dim=-1, keepdim=True)
    return norm_R1.square_()


class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * (offset + w)` over the last dimension; the result has x's dtype.

    Some checkpoints store w around zero; their offset is 1.
    """

    def __init__(self, weight_C: Tensor, eps: float, offset: float = 0.0) -> None:
        self.scale_C = weight_C.float() + offset
        self.eps = eps

    def __call__(self, x_NC: Tensor) -> Tensor:
        if has_kernels(x_NC.device):
            from headwater.mixers.gpu.norm import rms_norm  # needs Triton

            return rms_norm(x_NC, self.scale_C, self.eps, x_NC.dtype)
        return self.in_float32(x_NC).to(x_NC.dtype)

    def in_float32(self, x_NC: Tensor) -> Tensor:
        """Compute the norm without rounding to x's dtype."""
        h_NC = x_NC.float()
        return (h_NC * inverse_rms(h_NC, self.eps)).mul_(self.scale_C)


class StreamNorm:
    """Norm of the residual stream in the dtype of its readers; on a GPU one kernel adds a layer's output and norms."""

    def __init__(self, norm: RMSNorm, dtype: torch.dtype) -> None:
        self.norm, self.dtype = norm, dtype

    def __call__(self, x_NC: Tensor) -> Tensor:
        """Return the norm of the stream."""
        if has_kernels(x_NC.device):
            from headwater.mixers.gpu.norm import rms_norm  # needs Triton

            return rms_norm(x_NC, self.norm.scale_C, self.norm.eps, self.dtype)
        return self.norm(x_NC).to(self.dtype)

    def after(self, x_NC: Tensor, out_NC: Tensor, scale: float) -> Tensor:
        """Add a layer's output, times `scale`, to the stream in place; return the norm of the sum."""
        if has_kernels(x_NC.device) and dense(x_NC) is x_NC:
            from headwater.mixers.gpu.norm import rms_norm  # needs Triton

            return rms_norm(x_NC, self.norm.scale_C, self.norm.eps, self.dtype, out_NC, scale)
        x_NC += out_NC if scale == 1.0 else out_NC * scale
        return self(x_NC)


class Unnormed:
    """Residual stream as a layer without a norm before it reads it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, x_NC: Tensor) -> Tensor:
        """Return a copy of the stream."""
        return x_NC.to(self.dtype, copy=True)

    def after(self, x_NC: Tensor, out_NC: Tensor, scale: float) -> Tensor:
        """Add a layer's output, times `scale`, to the stream in place; return a copy of the sum."""
        x_NC += out_NC if scale == 1.0 else out_NC * scale
        return self(x_NC)


def empty_vectors(*shape: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Allocate float32 memory: a view of that shape, and the whole vectors that the view is the beginning of."""
    size = math.prod(shape)
    vectors = torch.empty(-(-size // VECTORS) * VECTORS, device=device)
    return vectors[:size].view(shape), vectors


def exp2_(vectors: Tensor) -> Tensor:
    """2^x in place, of flat memory from `empty_vectors`."""
    if vectors.device.type != "cpu":
        return vectors.exp2_()
    for piece in vectors.split(PIECE):
        piece.exp2_()
    return vectors
