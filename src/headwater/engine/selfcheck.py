"""Start-up self-check: do this machine's kernels give a row the same bits in whatever company it is computed?

It runs the very functions that the model runs, at the model's shapes, dtype and thread count, before any weight is
packed, since it chooses how weights are packed. R rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headwater.mixers import activations
from headwater.mixers.gated_delta_net import fast
from headwater.mixers.linear import Linear, first_bad_height
from headwater.mixers.numerics import Numerics
from headwater.spec import KEY_BLOCK, ModelSpec

# Heights at which kernels were seen to change, and what lies between; as many as the budget allows.
HEIGHTS = (1, 2, 3, 4, 7, 8, 16, 17, 32, 33, 64, 128, 255, 256, 512, 1024, 2048)
MULTIPLY_ADDS = 5 * 10**9  # for one weight: about a tenth of a second
MOST_OUTPUTS = 1024  # of a weight: more are more of the same blocks
FUSED_ROWS = 33  # rows: what follows a product works on blocks of few of them
ATTENTION_ROWS = (8, 16, 64, 256)
CHUNK_COUNTS = (1, 2, 3)
SEQUENCES = (1, 2, 3, 7)


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What was found: the way of products that keeps bits, or the first kernel that breaks them."""

    deterministic: bool
    broken_by: str | None
    mode: str  # of `Numerics`


def self_check(spec: ModelSpec, device: str = "cpu", reproducible: bool = True) -> SelfCheck:
    """Choose between packed and tiled products for this model; `reproducible=False` asks for no guard at all."""
    if not reproducible:
        return SelfCheck(False, "switched off", "plain")
    kernels = next(_broken_kernels(spec, device), None)
    broken = ""
    for mode in ("packed", "tiled"):
        broken = next(_broken_products(spec, device, mode), None)
        if broken is None:
            return SelfCheck(kernels is None, kernels, mode)
    return SelfCheck(False, kernels or broken, "tiled")


def weight_shapes(spec: ModelSpec) -> set[tuple[int, int]]:
    """(inputs, outputs) of the model's weights, as far as they matter to the choice of a kernel."""
    width, shapes = spec.hidden_size, {(spec.hidden_size, spec.vocab_size)}
    if "attention" in spec.mixers:
        a = spec.attention
        shapes |= {(width, 2 * (a.heads + a.kv_heads) * a.head_dim), (a.heads * a.head_dim, width)}
    if "gated_delta_net" in spec.mixers:
        d = spec.delta_net
        values = d.v_heads * d.v_dim
        shapes |= {(width, d.channels + values + 2 * d.v_heads), (values, width)}
    inner = {spec.intermediate_size} if "mlp" in spec.ffns else set()
    if spec.moe is not None:
        inner |= {spec.moe.intermediate, spec.moe.shared_intermediate}
        shapes |= {(width, spec.moe.experts), (width, 1)}
    for size in inner:
        shapes |= {(width, 2 * size), (size, width)}
    return {(n_in, min(n_out, MOST_OUTPUTS)) for n_in, n_out in shapes}


def _random(spec: ModelSpec, device: str) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, spec.dtype_name)
    return lambda *shape: torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


def _broken_products(spec: ModelSpec, device: str, mode: str) -> Iterator[str]:
    random = _random(spec, device)
    for n_in, n_out in sorted(weight_shapes(spec)):
        heights = _affordable(n_in * n_out)
        x_RK = random(heights[-1], n_in)
        for shared in (False, True) if spec.tied and n_in == spec.hidden_size else (False,):
            try:
                linear = Linear(random(n_out, n_in), numerics=Numerics(mode), shared=shared)
                height = first_bad_height(linear, x_RK, heights) or _bad_fused_height(linear, x_RK, heights)
            except RuntimeError as error:  # a packed layout that this machine has no kernel for
                yield f"product {n_in} x {n_out}, {spec.dtype_name}, {mode}: {error}"
                continue
            if height is not None:
                yield f"product {n_in} x {n_out}, {spec.dtype_name}, {mode}, at {height} rows"


def _bad_fused_height(linear: Linear, x_RK: torch.Tensor, heights: tuple[int, ...]) -> int | None:
    """The same for products that go on with their result: activation and factor of a gated MLP."""
    few = [height for height in heights if height <= FUSED_ROWS]

    def gated(x_RK: torch.Tensor) -> torch.Tensor:
        return linear.times(x_RK, linear.swish(x_RK))

    return first_bad_height(gated, x_RK[:FUSED_ROWS], few)


def _affordable(multiply_adds_a_row: int) -> tuple[int, ...]:
    """Ascending heights, at least the first ones up to 33."""
    heights: tuple[int, ...] = ()
    spent = 0
    for height in HEIGHTS:
        spent += 2 * height * multiply_adds_a_row
        if height > 33 and spent > MULTIPLY_ADDS:
            break
        heights += (height,)
    return heights


def _broken_kernels(spec: ModelSpec, device: str) -> Iterator[str]:
    random = _random(spec, device)
    if "attention" in spec.mixers:
        yield from _broken_attention(spec, random)
    if "gated_delta_net" in spec.mixers:
        yield from _broken_delta_rule(spec, random)
    x_RK = random(max(HEIGHTS[:-2]), 75).float()  # a width off every vector's
    for name in ("sigmoid", "silu", "softplus", "inverse_l2"):
        height = first_bad_height(getattr(activations, name), x_RK, HEIGHTS[:-2])
        if height is not None:
            yield f"{name} at {height} rows"


def _broken_attention(spec: ModelSpec, random: Callable[..., torch.Tensor]) -> Iterator[str]:
    heads, width = spec.attention.kv_heads, spec.attention.head_dim
    q_GRD, k_GKD, v_GKD = (random(1, heads, KEY_BLOCK, width) for _ in range(3))
    mask_RK = torch.zeros(KEY_BLOCK, KEY_BLOCK, dtype=q_GRD.dtype, device=q_GRD.device)

    def attend(rows: slice) -> torch.Tensor:
        return F.scaled_dot_product_attention(q_GRD[:, :, rows], k_GKD, v_GKD, attn_mask=mask_RK[rows])

    whole_GRD = attend(slice(None))
    for n in ATTENTION_ROWS:
        for rows in (slice(0, n), slice(KEY_BLOCK - n, KEY_BLOCK)):
            if not torch.equal(attend(rows), whole_GRD[:, :, rows]):
                yield f"attention at {n} rows"


def _broken_delta_rule(spec: ModelSpec, random: Callable[..., torch.Tensor]) -> Iterator[str]:
    """Chunks computed together or apart, sequences decoded together or apart."""
    d = spec.delta_net
    n = max(*CHUNK_COUNTS, *SEQUENCES)
    qk = random(n, fast.CHUNK, 2, d.k_heads, d.k_dim).float()
    v = random(n, fast.CHUNK, d.v_heads, d.v_dim).float()
    g, beta = (
        -random(n, fast.CHUNK, d.v_heads).float().abs(),
        activations.sigmoid(random(n, fast.CHUNK, d.v_heads).float()),
    )
    state = random(n, d.v_heads, d.k_dim, d.v_dim).float()

    def advance(at: slice) -> tuple[torch.Tensor, torch.Tensor]:
        after = state[at].clone().view(-1, d.k_dim, d.v_dim)
        out = after.new_empty(len(after), fast.CHUNK, d.v_dim)
        fast.advance_into(fast.prepare(qk[at], v[at], g[at], beta[at]), slice(None), after, out)
        return out.unflatten(0, (-1, d.v_heads)), after.unflatten(0, (-1, d.v_heads))

    def decode(at: slice) -> tuple[torch.Tensor, torch.Tensor]:
        after = state[at].clone()
        return fast.decode_step(qk[at, 0], v[at, 0], g[at, 0], beta[at, 0], after), after

    for name, step, counts in (("chunks", advance, CHUNK_COUNTS), ("decoding sequences", decode, SEQUENCES)):
        whole = step(slice(0, n))
        for count in counts:
            for at in (slice(0, count), slice(n - count, n)):
                if not all(torch.equal(part, of[at]) for part, of in zip(step(at), whole, strict=True)):
                    yield f"delta rule at {count} {name}"
