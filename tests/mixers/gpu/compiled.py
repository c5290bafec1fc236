"""Compiles the kernels for a card that is not there, at the widths of real models, and prints what each one takes.

`python -m tests.mixers.gpu.compiled`: a line of JSON a kernel. Triton's interpreter must not be chosen in the process.
"""

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from headwater.engine.proof import gpu_check as kernel_check
from headwater.layers.feed_forward import Experts
from headwater.layers.gdn import DeltaNet
from headwater.layers.kda import DeltaAttention
from headwater.layers.mamba import Mamba
from headwater.layers.mamba2 import Mamba2
from headwater.layers.mla import LatentAttention
from headwater.layers.short_conv import ShortConv
from headwater.mixers import gpu
from headwater.mixers.activations import RMSNorm, StreamNorm, gated_rms_norm_into
from headwater.mixers.gpu.attention import write
from headwater.mixers.gpu.norm import place
from headwater.mixers.gpu.pointwise import delta_gates, open_
from headwater.mixers.gpu.product import ProductOnGpu
from headwater.mixers.gpu.sampling import Draw, choose
from headwater.mixers.numerics import Numerics, use
from headwater.mixers.weights import Weights
from headwater.models.build import RECURRENT

AMPERE = GPUTarget("cuda", 80, 32)
POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
WIDTH = 64  # of the model
DELTA_NET = DeltaNet(WIDTH, 2, 4, 128, 128, 4)  # Qwen3.5's heads, fewer of them: a kernel does not know their number
DELTA_ATTENTION = DeltaAttention(WIDTH, heads=2, head_dim=128, conv=4)
MAMBA = Mamba(WIDTH, inner=128, state=16, conv=4, step_rank=16)
MAMBA2 = Mamba2(WIDTH, 2, 64, 128, 1, 4)
SHORT_CONV = ShortConv(WIDTH, conv=3)
ATTENTION = {(1, 8, 256): False, (2, 4, 128): False, (1, 8, 64): True}  # with sinks or without
LATENT = LatentAttention(WIDTH, heads=16, latent=512, nope_dim=128, rope_dim=64, v_dim=128)
EXPERTS = Experts(WIDTH, 4, 2, 64)


def compile_only(kernel: Any, *args: object, grid: object, warmup: bool, **options: Any) -> None:
    """Compile the kernel of a launch for these arguments, and do not run it."""
    del grid, warmup
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    tuned = {name: given.pop(name) for name in ("num_stages", "num_warps") if name in given}
    signature = {p.name: "constexpr" if p.is_constexpr else _kind(given[p.name]) for p in kernel.params}
    constants = {(p.num,): given[p.name] for p in kernel.params if p.is_constexpr}
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=AMPERE, options=tuned)
    name = f"{kernel.fn.__module__}.{kernel.fn.__name__}".removeprefix("headwater.mixers.")
    print(json.dumps({"kernel": name, "shared": compiled.metadata.shared}), flush=True)


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def random(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def main() -> None:
    gpu.DEVICES = ("cpu",)
    use(Numerics("plain"))
    JITFunction.run = compile_only
    kernel_check.LENGTH, kernel_check.CUTS, kernel_check.SEQUENCES = 137, (64,), (7,)
    for layer in (DELTA_NET, DELTA_ATTENTION, MAMBA, MAMBA2, SHORT_CONV):
        tensors = {name: random(*shape).float() for name, shape in layer.tensors().items()}
        mixer = RECURRENT[type(layer)](layer, Weights(tensors))
        list(kernel_check.broken_recurrence(layer, mixer, random, "cpu"))
    for shape, sunk in ATTENTION.items():
        list(kernel_check.broken_attention(shape, random, "cpu", sunk))
    list(kernel_check.broken_latent_attention(LATENT, random, "cpu"))
    list(kernel_check.broken_experts(EXPERTS, random, "cpu"))
    norm = StreamNorm(RMSNorm(random(1024), 1e-6), torch.bfloat16)
    norm.after(random(7, 1024), random(7, 1024), 1.0)
    gated_rms_norm_into(random(7, 4, 128), random(7, 4, 128).float(), random(7, 4, 128), random(128).float(), 1e-6)
    place(random(7, 4, 256), RMSNorm(random(256), 1e-6), random(7, 2, 32).float(), False)
    open_(random(7, 4, 256), random(7, 4, 256))
    delta_gates(random(7, 4), random(7, 4), random(4).float(), random(4).float(), 1.0)
    keys, values = random(2, 7, 512).unbind(0)
    write((random(4, 64 * 512), random(4, 64 * 512)), torch.zeros(7).long(), torch.zeros(7).long(), keys, values)
    choose(torch.zeros(7, 151_936), [Draw(row, temperature=1.0) for row in range(7)])
    for n_in in (1024, 4096):
        product = ProductOnGpu(random(64, n_in), random(64), torch.bfloat16)
        product.answers_into(random(7, 64), random(7, n_in), "swish", random(7, 64))
        unbiased = ProductOnGpu(random(64, n_in), None, torch.bfloat16)
        unbiased.opened(unbiased, random(7, n_in))


if __name__ == "__main__":
    main()
