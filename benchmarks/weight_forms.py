"""Forms of quantised weights, and rounding to them without calibration data, to compare what each costs.

Checkpoints of these forms are made by other tools, which may choose scales better. GGUF types with blocks of 256 are
rounded by llama.cpp's own quantiser, if VENV_LLAMA names an environment that has it. N outputs, X groups of g inputs.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwater.kernels import FP4, NF4
from headwater.mixers.quantised import Quantised
from headwater.models import quantiser
from headwater.models.gguf.blocks import IQ4_NL, IQ4_NL_ZERO, TYPES, Blocks
from headwater.models.packing import E2M1, float4, float8, numbers, zeros
from headwater.models.quantiser import in_float8

E2M1_VALUES = (torch.tensor(E2M1, dtype=torch.float32) - E2M1[0]) / 2
E2M1_LARGEST, E4M3_LARGEST = 6, 448
E2M1_EXPONENT, E4M3_EXPONENT = 2, 8  # of the largest number
E8M0_BIAS = 127


def nearest(x: Tensor, values: Tensor) -> Tensor:
    """Return the number of the nearest value, uint8."""
    order = values.argsort(stable=True)
    between = (values[order][1:] + values[order][:-1]) / 2
    return order[torch.bucketize(x, between)].to(torch.uint8)


def of_groups(weight_NK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return a weight in groups of inputs, [N, X, g], and the largest magnitude of each, which is not zero."""
    x_NXg = weight_NK.float().unflatten(1, (-1, math.gcd(group, weight_NK.shape[1])))
    return x_NXg, x_NXg.abs().amax(-1).clamp_min_(1e-30)


def nvfp4(weight_NK: Tensor) -> Quantised:
    """NVFP4: e2m1 with an e4m3 scale for 16 inputs, times one float32, which makes the largest scale 448."""
    x_NXg, largest_NX = of_groups(weight_NK, 16)
    outer = largest_NX.max() / (E2M1_LARGEST * E4M3_LARGEST)
    scale_NX = (largest_NX / (E2M1_LARGEST * outer)).to(torch.float8_e4m3fn)
    return _float4(x_NXg / (scale_NX.float() * outer).clamp_min(1e-30)[:, :, None], scale_NX, outer)


def mxfp4(weight_NK: Tensor) -> Quantised:
    """MXFP4 (OCP Microscaling 1.0, 6.3): e2m1 with a power of two for 32 inputs, that of the largest one less 2."""
    x_NXg, byte_NX = _powers(weight_NK, E2M1_EXPONENT)
    return _float4(x_NXg, byte_NX, None)


def mxfp8(weight_NK: Tensor) -> Quantised:
    """MXFP8: e4m3 with a power of two for 32 inputs."""
    x_NXg, byte_NX = _powers(weight_NK, E4M3_EXPONENT)
    return float8(x_NXg.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).flatten(1), numbers(byte_NX))


def _powers(weight_NK: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
    """Return a weight divided by the scales of its groups, and these as bytes (e8m0)."""
    x_NXg, largest_NX = of_groups(weight_NK, 32)
    power_NX = largest_NX.log2().floor() - exponent
    return x_NXg / torch.exp2(power_NX)[:, :, None], (power_NX + E8M0_BIAS).clamp(0, 254).to(torch.uint8)


def _float4(x_NXg: Tensor, scale_NX: Tensor, outer: Tensor | None) -> Quantised:
    code_NK = nearest(x_NXg, E2M1_VALUES).flatten(1)
    (n_out, n_in), byte_NB = code_NK.shape, code_NK[:, 0::2] | code_NK[:, 1::2] << 4
    return float4(byte_NB, scale_NX, outer, n_out, n_in, "weight")


def of_table(weight_NK: Tensor, table: tuple[float, ...]) -> Quantised:
    """nf4 or fp4 of bitsandbytes: numbers from -1 to 1 with a float32 scale for 64 inputs, the largest magnitude."""
    x_NXg, largest_NX = of_groups(weight_NK, 64)
    code_NXg = nearest(x_NXg / largest_NX[:, :, None], torch.tensor(table))
    return Quantised(code_NXg.flatten(1), 4, largest_NX, zeros(len(weight_NK), 0), table=table)


def iq4_nl(weight_NK: Tensor) -> Quantised:
    """IQ4_NL: one of 16 integers with a float16 scale for 32 inputs, which makes the largest input -127."""
    x_NXg, _ = of_groups(weight_NK, 32)
    peak_NX1 = x_NXg.gather(-1, x_NXg.abs().argmax(-1, keepdim=True))
    scale_NX1 = (peak_NX1 / -127).half()
    values = torch.tensor(IQ4_NL, dtype=torch.float32) - IQ4_NL_ZERO
    code_NXg = nearest(x_NXg / torch.where(scale_NX1 == 0, 1, scale_NX1.float()), values)
    zero_N1 = zeros(len(weight_NK), IQ4_NL_ZERO)
    return Quantised(code_NXg.flatten(1), 4, scale_NX1[:, :, 0], zero_N1, table=IQ4_NL)


def affine(weight_NK: Tensor, bits: int, group: int) -> Quantised:
    """Integers with a float16 scale and a zero for each group, over its full range: GPTQ, AWQ and MLX hold such."""
    x_NXg, _ = of_groups(weight_NK, group)
    top, low_NX, high_NX = 2**bits - 1, x_NXg.amin(-1).clamp_max(0), x_NXg.amax(-1).clamp_min(0)
    scale_NX = ((high_NX - low_NX) / top).clamp_min(1e-7).half()
    zero_NX = (-low_NX / scale_NX.float()).round().clamp(0, top)
    code_NXg = (x_NXg / scale_NX.float()[:, :, None]).round().add(zero_NX[:, :, None]).clamp(0, top)
    return Quantised(code_NXg.flatten(1).to(torch.uint8), bits, scale_NX, zero_NX.to(torch.uint8))


class LlamaCpp:
    """Rounding by llama.cpp's quantiser, of rows that are filled up with zeros to whole blocks."""

    def __init__(self, environment: Path) -> None:
        """Raises StopIteration for an environment without `xllamacpp`."""
        self._library = ctypes.CDLL(str(next(environment.glob("lib/*/site-packages/xllamacpp/xllamacpp.*.so"))))

    def forms(self) -> dict[str, Callable[[Tensor], Quantised | None]]:
        """Return the types with blocks of 256 inputs, of the most bits first."""
        names = ("Q6_K", "Q5_K", "Q4_K", "IQ4_XS", "Q3_K", "IQ3_S", "IQ3_XXS", "Q2_K", "IQ2_S", "IQ2_XS", "IQ2_XXS")
        numbers = {kind.name: number for number, kind in TYPES.items()}
        return {f"{name}, by llama.cpp": partial(self.rounded, numbers[name]) for name in names}

    def rounded(self, number: int, weight_NK: Tensor) -> Quantised:
        """Return a weight in the type with this number; IQ2 types get an importance of 1 for each input."""
        kind, (n_out, n_in) = TYPES[number], weight_NK.shape
        assert isinstance(kind, Blocks)
        x_NK = pad(weight_NK.float(), (0, -n_in % kind.inputs)).contiguous()
        block_NBY = torch.empty(n_out, x_NK.shape[1] // kind.inputs, kind.bytes, dtype=torch.uint8)
        importance = torch.ones(x_NK.shape[1]) if kind.name.startswith("IQ2") else None
        source, target = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (x_NK, block_NBY))
        sizes = map(ctypes.c_int64, (0, n_out, x_NK.shape[1]))
        weights = None if importance is None else ctypes.c_void_p(importance.data_ptr())
        self._library.ggml_quantize_chunk(ctypes.c_int(number), source, target, *sizes, weights)
        held = kind.read(block_NBY)
        (scale_NX, minimum_NX), groups = held.scales(), n_in // held.group
        cut = {"scale_NX": scale_NX[:, :groups], "minimum_NX": None if minimum_NX is None else minimum_NX[:, :groups]}
        return replace(held, code_NK=held.code_NK[:, :n_in], **cut, outer_scale_NS=None, outer_minimum_NS=None)


FORMS: dict[str, Callable[[Tensor], Quantised | None]] = {
    "float8 (e4m3), groups of 64": in_float8,
    "MXFP8": mxfp8,
    "NVFP4": nvfp4,
    "MXFP4": mxfp4,
    "nf4, blocks of 64": lambda weight_NK: of_table(weight_NK, NF4),
    "fp4, blocks of 64": lambda weight_NK: of_table(weight_NK, FP4),
    "IQ4_NL": iq4_nl,
    "affine, 4 bits, groups of 64": lambda weight_NK: affine(weight_NK, 4, 64),
    "affine, 3 bits, groups of 64": lambda weight_NK: affine(weight_NK, 3, 64),
    "affine, 2 bits, groups of 16": lambda weight_NK: affine(weight_NK, 2, 16),
}


def all_forms() -> dict[str, Callable[[Tensor], Quantised | None]]:
    """Return the forms, and those of llama.cpp's quantiser if there is one."""
    environment = os.environ.get("VENV_LLAMA")
    return FORMS | (LlamaCpp(Path(environment)).forms() if environment else {})


@contextmanager
def rounded_to(form: Callable[[Tensor], Quantised | None]) -> Iterator[None]:
    """Let `--weights int4` round weights to a form meanwhile; embedding and head stay int8."""
    of_bits = quantiser.quantised

    def quantised(weight_NK: Tensor, bits: int) -> Quantised | None:
        return form(weight_NK) if bits == quantiser.BITS["int4"] else of_bits(weight_NK, bits)

    with patch.object(quantiser, "quantised", quantised):
        yield
