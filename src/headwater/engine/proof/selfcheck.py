"""Start-up self-check: whether this machine's kernels give a row the same bits whatever other rows are computed.

It runs the same functions as the model, at the model's shapes, dtype and thread count, before any weight is
packed, since it chooses how weights are packed. On a CPU, some results of products, recurrences, experts and grouped
attention are denormal in float32: a thread that does not flush them is found. In float16, inputs are not that small.

R rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

import torch

from headwater import kernels
from headwater.engine.passes import broken_passes
from headwater.engine.proof import beginnings
from headwater.engine.proof.chain_check import broken_chains, kept_layers
from headwater.engine.proof.weight_formats import formats_of, pack, weights_of
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts
from headwater.layers.layer import Layer
from headwater.layers.mla import LatentAttention
from headwater.mixers import activations, recurrent, softmax
from headwater.mixers.activations import RMSNorm, silu
from headwater.mixers.batch import StepBatch
from headwater.mixers.gpu import has_kernels
from headwater.mixers.linear import Linear, Product, answers_product, first_bad_height, guarded_modes, prompts_product
from headwater.mixers.mla import TILE, AbsorbedHeads, expanded_heads
from headwater.mixers.numerics import TINY, Numerics, same_bits
from headwater.mixers.products import Weight
from headwater.mixers.recurrent import RecurrentMixer
from headwater.mixers.slices import CHUNK
from headwater.mixers.softmax import KEYS
from headwater.mixers.weights import Weights
from headwater.models.build import RECURRENT, layer_classes, layer_function
from headwater.spec import KEY_BLOCK, ModelSpec

# Heights at which kernels were seen to change, and heights between; as many as the budget allows.
HEIGHTS = (1, 2, 3, 4, 7, 8, 16, 17, 32, 33, 64, 128, 255, 256, 512, 1024, 2048)
Narrow = tuple[Layer, RecurrentMixer[Any]]  # a recurrent layer, and what computes it
Check = Callable[[], Iterator[str]]  # names, one after the other, where it finds bits changed
Progress = Callable[[int, int], None]  # called with the numbers of checks done and of all, which are equal at the end
MULTIPLY_ADDS = 5 * 10**9  # for one weight: about a tenth of a second
MAX_OUTPUTS = 1024  # of a weight that is checked: more outputs are more of the same blocks
FUSED_ROWS = 33  # rows: fused activations work on blocks of few rows
ATTENTION_ROWS = (8, 16, 64, 256)
CHUNK_COUNTS = (1, 2, 3)
SEQUENCES = (1, 2, 3, 7)
NARROW = 64  # model width that recurrences are tried with


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Result of the self-check: the mode of products that keeps bits, or the first kernel that breaks them."""

    deterministic: bool
    broken_by: str | None
    mode: str  # of `Numerics`
    proven: datetime | None = None  # UTC time of the proof (`engine/proof/verdict.py`)


def no_progress(done: int, total: int) -> None:
    """Show no progress."""


def self_check(
    spec: ModelSpec, device: str = "cpu", reproducible: bool = True, progress: Progress = no_progress
) -> SelfCheck:
    """Choose between kernels and torch's tiles for this model's products; `reproducible=False` asks for no guard."""
    if not reproducible:
        return SelfCheck(False, "switched off", "plain")
    checks = list(_kernel_checks(spec, device))
    done, total = 0, len(checks) + len(_mode_checks(spec, device, guarded_modes(device)[0]))

    def first_broken(checks: list[Check]) -> str | None:
        nonlocal done
        for check in checks:
            progress(done, total)
            broken = next(check(), None)
            if broken is not None:
                return broken
            done += 1
        return None

    kernels, broken = first_broken(checks), None
    for mode in guarded_modes(device):
        checks = _mode_checks(spec, device, mode)
        total = done + len(checks)
        broken = first_broken(checks)
        if broken is None:
            break
    progress(total, total)
    return SelfCheck(kernels is None and broken is None, kernels or broken, mode)


def last_checks_first(spec: ModelSpec) -> Iterator[None]:
    """Do a CPU's checks from the last one to the first, whatever they find: the kernels are compiled then."""
    mode = guarded_modes()[0]
    for check in reversed([*_kernel_checks(spec, "cpu"), *_mode_checks(spec, "cpu", mode)]):
        next(check(), None)
        yield


def weight_shapes(spec: ModelSpec) -> set[tuple[int, int]]:
    """Return (inputs, outputs) of the model's products, those that decide which kernel is chosen."""
    return {(n_in, n_out) for n_in, n_out, _ in _products(spec)}


def _products(spec: ModelSpec) -> set[tuple[int, int, torch.dtype]]:
    """Return (inputs, outputs, dtype) of the products: some routers compute in float32, whatever the model does."""
    dtype = getattr(torch, spec.dtype_name)
    seen = {(spec.hidden_size, spec.vocab_size, dtype)}
    for layer in set(spec.layers):
        layer_function(0, layer, Recorded(layer, dtype, seen))
    return {(n_in, min(n_out, MAX_OUTPUTS), dtype) for n_in, n_out, dtype in seen}


class Recorded(Weights):
    """Weights without content that record (inputs, outputs, dtype) of the products built from them."""

    def __init__(self, layer: Layer, dtype: torch.dtype, seen: set[tuple[int, int, torch.dtype]]) -> None:
        zero = torch.zeros((), dtype=dtype)
        super().__init__({name: zero.expand(shape) for name, shape in layer.tensors().items()}, dtype)
        self._seen = seen

    def linear(self, *names: str) -> Linear:
        shapes = [self.stored(f"{name}.weight").shape for name in names]
        return self._written(shapes[0][1], sum(shape[0] for shape in shapes))

    def packed(self, weight_NK: Weight | Sequence[Weight], bias_N: torch.Tensor | None = None) -> Linear:
        weights = weight_NK if isinstance(weight_NK, Sequence) else [weight_NK]
        return self._written(weights[0].shape[1], sum(weight.shape[0] for weight in weights))

    def of_experts(self, stacked: Sequence[Weight], build: Callable[[list[Weight], torch.dtype], Any]) -> Any:
        return self.packed(stacked[0])

    def _written(self, n_in: int, n_out: int) -> Linear:
        self._seen.add((n_in, n_out, self.dtype))
        return Linear(torch.zeros(1, 1), numerics=Numerics("plain"))


def _random(spec: ModelSpec, device: str) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, spec.dtype_name)
    return lambda *shape: torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


def _mode_checks(spec: ModelSpec, device: str, mode: str) -> list[Check]:
    """Return the checks of what depends on the mode of products: these, and whole layers with several rows."""
    return [*_product_checks(spec, device, mode), *_chain_checks(spec, device, mode)]


def _chain_checks(spec: ModelSpec, device: str, mode: str) -> list[Check]:
    random = _random(spec, device)
    return [partial(broken_chains, layer, spec, random, device, mode) for layer in kept_layers(spec.layers)]


def _product_checks(spec: ModelSpec, device: str, mode: str) -> list[Check]:
    random = _random(spec, device)
    return [
        partial(_broken_product, spec, n_in, n_out, dtype, mode, random)
        for n_in, n_out, dtype in sorted(_products(spec), key=str)
    ]


def _broken_product(
    spec: ModelSpec, n_in: int, n_out: int, dtype: torch.dtype, mode: str, random: Callable[..., torch.Tensor]
) -> Iterator[str]:
    """Name heights and threads at which rows of prompts or of answers, some with denormal results, change bits."""
    heights = _affordable(n_in * n_out)
    x_RK = random(heights[-1], n_in).to(dtype)
    tiny_TK = x_RK[::5].zero_()
    tiny_TK[range(len(tiny_TK)), [row % n_in for row in range(len(tiny_TK))]] = TINY
    for held, weight_NK in weights_of(spec, random(n_out, n_in), dtype):
        name = f"product {n_in} x {n_out}, {_short(dtype)} with weights in {held}, {mode}"
        try:
            linear = Linear(weight_NK, numerics=Numerics(mode), dtype=dtype)
            if isinstance(weight_NK, torch.Tensor) and not _looks_up(linear, weight_NK):
                yield f"{name}, rows looked up"
            for rows, product in (("answers", answers_product(linear)), ("prompts", prompts_product(linear))):
                height = first_bad_height(product, x_RK, heights)
                if height is not None:
                    yield f"{name}, at {height} rows of {rows}"
            few = [height for height in heights if height <= FUSED_ROWS]
            fused = first_bad_height(_fused(linear), x_RK[:FUSED_ROWS], few)
            if fused is not None:
                yield f"{name}, with an activation, at {fused} rows"
            if mode == "compiled" and (threads := _bad_threads(answers_product(linear), x_RK[:FUSED_ROWS])):
                yield f"{name}, with {threads} threads"
        except RuntimeError as error:  # a layout that this machine has no kernel for
            yield f"{name}: {error}"


def _fused(linear: Linear) -> Product:
    """Return a product of decoding rows with an activation and a factor."""
    return lambda x_RK: linear.times(x_RK, linear.swish(x_RK, 0), 0)


def _looks_up(linear: Linear, weight_NK: torch.Tensor) -> bool:
    """Return whether a product's rows are those of its weight, as for the tokens of an embedding that is the head."""
    row_R = torch.arange(len(weight_NK), device=weight_NK.device)
    return torch.equal(linear.rows(row_R), weight_NK.to(linear.dtype))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bad_threads(product: Callable[[torch.Tensor], torch.Tensor], x_RK: torch.Tensor) -> int | None:
    """Return the first number of threads with which a product of kernels has other bits than with all, or None."""
    from headwater.kernels.compiling import use_threads

    n, whole_RN = torch.get_num_threads(), product(x_RK)
    try:
        for threads in range(1, n):
            use_threads(threads)
            if not same_bits(product(x_RK), whole_RN):
                return threads
    finally:
        use_threads(n)
    return None


def _affordable(multiply_adds_a_row: int) -> tuple[int, ...]:
    """Return ascending heights within the budget, at least those up to 33."""
    heights: tuple[int, ...] = ()
    spent = 0
    for height in HEIGHTS:
        spent += 2 * height * multiply_adds_a_row
        if height > 33 and spent > MULTIPLY_ADDS:
            break
        heights += (height,)
    return heights


def _kernel_checks(spec: ModelSpec, device: str) -> Iterator[Check]:
    random = _random(spec, device)
    layers = set(spec.layers)
    latents = {layer for layer in layers if isinstance(layer, LatentAttention)}
    if has_kernels(device):
        from headwater.engine.proof import gpu_check  # needs Triton

        recurrent = {layer: _narrowed(layer, random, device) for layer in layers if type(layer) in RECURRENT}
        yield partial(gpu_check.broken_kernels, layers, recurrent, random, device)
        layers = {layer for layer in layers if not gpu_check.is_covered(layer, recurrent)}
    if torch.device(device).type == "cpu" and kernels.available():
        from headwater.engine.proof.cpu_checks import (  # needs numba
            broken_attention,
            broken_decode,
            broken_experts,
            broken_prefill,
        )

        packs = {name: partial(pack, name) for name in formats_of(spec)}
        for grouped in sorted({layer for layer in layers if isinstance(layer, GroupedAttention)}, key=repr):
            yield partial(broken_attention, grouped, random)
        for experts in sorted({layer for layer in layers if isinstance(layer, Experts)}, key=repr):
            yield partial(broken_experts, experts, random, packs)
        for layer in sorted({layer for layer in layers if type(layer) in RECURRENT}, key=repr):
            narrowed = _narrowed(layer, random, device)
            yield partial(broken_decode, *narrowed, random)
            yield partial(broken_prefill, *narrowed, random)
    sunk = any(isinstance(layer, GroupedAttention) and layer.sinks for layer in layers)
    for shape in sorted({shape for layer in layers for shape in attended(layer)}):
        yield partial(_broken_attention, *shape, random, sunk)
        yield partial(beginnings.broken_attention, *shape, random, sunk)
    for latent in sorted(latents, key=repr):
        yield partial(_broken_absorption, latent, random)
    for layer in sorted({layer for layer in layers if type(layer) in RECURRENT}, key=repr):
        yield partial(_broken_recurrence, _narrowed(layer, random, device), random, device)
        yield partial(beginnings.broken_recurrence, _narrowed(layer, random, device), random, device)
    yield partial(_broken_stream_norm, spec.hidden_size, random, device)
    yield partial(_broken_activations, random)
    yield partial(broken_passes, spec.vocab_size)


def _broken_activations(random: Callable[..., torch.Tensor]) -> Iterator[str]:
    x_RK = random(max(HEIGHTS[:-2]), 75).float()  # a width that is not a multiple of any vector's
    for name in ("sigmoid", "silu", "softplus", "inverse_l2"):
        height = first_bad_height(getattr(activations, name), x_RK, HEIGHTS[:-2])
        if height is not None:
            yield f"{name} at {height} rows"


def _broken_stream_norm(width: int, random: Callable[..., torch.Tensor], device: str) -> Iterator[str]:
    """Name row counts at which the norm of the residual stream, of float32 too, changes bits."""
    weight_C, x_NC = random(width).float(), random(max(HEIGHTS[:-2]), width)
    for stream_NC in (x_NC, x_NC.float()):
        norm = layer_classes(device).stream_norm(RMSNorm(weight_C, 1e-6), x_NC.dtype)
        height = first_bad_height(norm, stream_NC, HEIGHTS[:-2])
        if height is not None:
            yield f"norm of {width} channels at {height} rows"


def _narrowed(layer: Layer, random: Callable[..., torch.Tensor], device: str) -> Narrow:
    """Build a recurrent layer with random weights: its own heads, in a narrow model."""
    narrow = replace(layer, hidden=NARROW)
    tensors = {name: random(*shape).float() * NARROW**-0.5 for name, shape in narrow.tensors().items()}
    return narrow, RECURRENT[type(layer)](narrow, Weights(tensors, device=device))


def attended(layer: Layer) -> tuple[tuple[int, int, int], ...]:
    """Return KV heads, query heads that share one, and channels, for each attention that a layer computes."""
    if isinstance(layer, GroupedAttention):
        return ((layer.kv_heads, layer.heads // layer.kv_heads, layer.head_dim),)
    if isinstance(layer, LatentAttention):
        return (expanded_heads(layer), (1, layer.heads, sum(layer.kv_widths)))
    return ()


def _broken_attention(
    heads: int, sharing: int, width: int, random: Callable[..., torch.Tensor], sunk: bool = False
) -> Iterator[str]:
    """Name row counts and sequence counts at which attention, with sinks if `sunk`, changes bits."""
    sink_GQ = random(heads, sharing).float() if sunk else None
    sink_1G1 = None if sink_GQ is None else sink_GQ[None, :, :1]
    q_GRD, k_GKD, v_GKD = (random(1, heads, KEY_BLOCK, width) for _ in range(3))
    mask_RK = torch.zeros(KEY_BLOCK, KEY_BLOCK, dtype=q_GRD.dtype, device=q_GRD.device)

    def attend(rows: slice) -> torch.Tensor:
        return softmax.attend(q_GRD[:, :, rows], k_GKD, v_GKD, mask_RK[rows], sink_BHR=sink_1G1)

    whole_GRD = attend(slice(None))
    for n in ATTENTION_ROWS:
        for rows in (slice(0, n), slice(KEY_BLOCK - n, KEY_BLOCK)):
            if not torch.equal(attend(rows), whole_GRD[:, :, rows]):
                yield f"attention at {n} rows"
    q_BGQD, k_BKGD = random(SEQUENCES[-1], heads, sharing, width), random(SEQUENCES[-1], KEYS, heads, width)
    mask_B11K = torch.zeros(len(q_BGQD), 1, 1, KEYS, dtype=q_BGQD.dtype, device=q_BGQD.device)

    def decode(at_B: torch.Tensor) -> torch.Tensor:
        return softmax.decode(q_BGQD[at_B], (k_BKGD[at_B],) * 2, mask_B11K[at_B], sink_GQ=sink_GQ)

    count = first_bad_height(decode, torch.arange(len(q_BGQD), device=q_BGQD.device), SEQUENCES)
    if count is not None:
        yield f"attention at {count} decoding sequences"


def _broken_absorption(layer: LatentAttention, random: Callable[..., torch.Tensor]) -> Iterator[str]:
    """Name sequence counts at which the products of latent attention's heads change bits."""
    absorbed = AbsorbedHeads(layer, random(layer.heads, layer.nope_dim + layer.v_dim, layer.latent))
    for product, width in ((absorbed.query, layer.key_dim), (absorbed.value, layer.latent)):
        count = first_bad_height(product, random(TILE + 1, layer.heads, width), range(1, TILE + 1))
        if count is not None:
            yield f"{layer.kind} at {count} decoding sequences"


def _broken_recurrence(narrow: Narrow, random: Callable[..., torch.Tensor], device: str) -> Iterator[str]:
    """Name chunks whose bits depend on other chunks, and sequences whose bits depend on others in decode."""
    layer, mixer = narrow
    n = max(*CHUNK_COUNTS, *SEQUENCES)
    none = torch.empty(0, dtype=torch.int64)
    positions = torch.arange(CHUNK, device=device).repeat(n)
    rows = mixer.project(random(n * CHUNK, NARROW).float(), StepBatch(none, positions, (), none, (), none))
    mixed = silu(rows.mixed_NC.float()).unflatten(0, (n, CHUNK))
    gates = rows.gates_NX.unflatten(0, (n, CHUNK))
    state = beginnings.states_of(layer, n, random)["recurrent"]

    def advance(at: slice) -> tuple[torch.Tensor, torch.Tensor]:
        after = state[at].clone()
        return recurrent.advance(mixer.prepare(mixed[at], gates[at]), slice(0, len(after)), after), after

    def decode(at: slice) -> tuple[torch.Tensor, torch.Tensor]:
        after = state[at].clone()
        return mixer.decode(mixed[at, 0], gates[at, 0], after), after

    for name, step, counts in (("chunks", advance, CHUNK_COUNTS), ("decoding sequences", decode, SEQUENCES)):
        whole = step(slice(0, n))
        for count in counts:
            for at in (slice(0, count), slice(n - count, n)):
                if not all(torch.equal(part, of[at]) for part, of in zip(step(at), whole, strict=True)):
                    yield f"{layer.kind} at {count} {name}"
