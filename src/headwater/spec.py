"""What a model costs: the only place that knows sizes, in bytes and FLOPs. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.config_keys import ConfigKeys, text_config
from headwater.errors import CheckpointError, ConfigError
from headwater.types import CacheLayout, PrefillFlops

BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}
PAGE_ALIGN = 512  # bytes
PAGE_BYTES_WITHOUT_KV = 64 * 1024
MAX_LAYERS = 10_000  # far above any model: a config.json that asks for more is broken
KEY_BLOCK = 512  # tokens: an attention's bits depend on how its last block of keys is filled, so it is always full
MIXER_OF_LAYER_TYPE = {"full_attention": "attention", "linear_attention": "gated_delta_net"}


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a checkpoint: what one layer must remember of all tokens before."""

    layer: int
    name: str  # "recurrent" | "conv"
    shape: tuple[int, ...]
    dtype_name: str  # "float32" | "bfloat16" | "float16"
    offset: int  # bytes from the start of the checkpoint

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES_OF_DTYPE[self.dtype_name]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Where each layer's states stand in a checkpoint: one flat run of bytes."""

    parts: tuple[StatePart, ...]
    bytes: int

    @classmethod
    def of(cls, parts: list[tuple[int, str, tuple[int, ...], str]], align: int = 64) -> StateLayout:
        """Lay out (layer, name, shape, dtype_name) one after the other, each at a multiple of `align` bytes."""
        placed: list[StatePart] = []
        end = 0
        for layer, name, shape, dtype_name in parts:
            placed.append(StatePart(layer, name, shape, dtype_name, -(-end // align) * align))
            end = placed[-1].offset + placed[-1].bytes
        return cls(tuple(placed), end)

    def part(self, layer: int, name: str) -> StatePart:
        """The part of that layer and name; KeyError if there is none."""
        for part in self.parts:
            if part.layer == layer and part.name == name:
                return part
        raise KeyError((layer, name))


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Gated full attention with grouped queries; the last `head_dim - rotary_dim` channels carry no position."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """Gated DeltaNet: each key head serves `v_heads / k_heads` value heads."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int

    @property
    def channels(self) -> int:
        """What the convolution runs over: queries, keys and values."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Routed experts with one shared expert behind a gate."""

    experts: int
    per_token: int
    intermediate: int
    shared_intermediate: int
    normalise: bool  # the chosen experts' weights are scaled to sum to 1


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes of a model and what follows from them. Read from a checkpoint's config.json."""

    model_type: str
    dtype_name: str
    page_size: int  # tokens a page
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of dense gated MLPs; 0 where every layer has experts
    mixers: tuple[str, ...]  # a layer: "attention" | "gated_delta_net"
    ffns: tuple[str, ...]  # a layer: "mlp" | "moe"
    attention: AttentionShape
    delta_net: DeltaNetShape
    moe: MoeShape | None
    norm_eps: float
    tied: bool  # the head's weight is the embedding's
    max_length: int
    state: StateLayout

    @classmethod
    def from_config(cls, config: dict[str, Any], dtype: str, page_size: int = 64) -> ModelSpec:
        """Read a text model's config.json, or the `text_config` within one of a multimodal checkpoint.

        `dtype` is the one to compute in. Raises CheckpointError where a key is missing, of the wrong type, or asks
        for something the model code does not do.
        """
        if page_size <= 0 or page_size % 64:
            raise CheckpointError(f"page size is {page_size}, must be a multiple of 64")
        keys = ConfigKeys(config)
        keys.require("hidden_act", "silu", default="silu")
        keys.require("attention_bias", False, default=False)
        keys.require("rope_type", "default", default="default")
        mixers = _read_mixers(keys)
        moe = _read_moe(keys)
        delta_net = _read_delta_net(keys)
        return cls(
            model_type=keys.text("model_type"),
            dtype_name=dtype,
            page_size=page_size,
            vocab_size=keys.positive("vocab_size"),
            hidden_size=keys.positive("hidden_size"),
            intermediate_size=keys.integer("intermediate_size", 0 if moe else None),
            mixers=mixers,
            ffns=_read_ffns(keys, len(mixers), moe),
            attention=_read_attention(keys),
            delta_net=delta_net,
            moe=moe,
            norm_eps=keys.number("rms_norm_eps", 1e-6),
            tied=keys.flag("tie_word_embeddings", False),
            max_length=keys.positive("max_position_embeddings", 32768),
            state=_state_layout(mixers, delta_net, dtype),
        )

    @classmethod
    def from_folder(cls, folder: Path, dtype: str = "auto", page_size: int = 64) -> ModelSpec:
        """Read a checkpoint folder's config.json; `auto` is the dtype that its weights are kept in."""
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        named = [part.get(key) for part in (text_config(config), config) for key in ("dtype", "torch_dtype")]
        stored = next((name for name in named if name), "bfloat16")
        return cls.from_config(config, stored if dtype == "auto" else dtype, page_size)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.mixers) if kind == "attention")

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight, and of one element of KV."""
        return BYTES_OF_DTYPE[self.dtype_name]

    @property
    def kv_row_elements(self) -> int:
        """Elements of one token's K (or V) in one layer."""
        return self.attention.kv_heads * self.attention.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        return len(self.attention_layers) * 2 * self.kv_row_elements * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """KV of one page over all attention layers, rounded up to 512; 64 KiB where there is none."""
        kv_bytes = self.kv_bytes_per_token * self.page_size
        return -(-kv_bytes // PAGE_ALIGN) * PAGE_ALIGN if kv_bytes else PAGE_BYTES_WITHOUT_KV

    @property
    def checkpoint_bytes(self) -> int:
        return self.state.bytes

    @property
    def checkpoint_pages(self) -> int:
        return -(-self.checkpoint_bytes // self.page_bytes)

    @property
    def slot_pages(self) -> int:
        """Pages that back one running sequence's states."""
        return self.checkpoint_pages

    @property
    def kv_pages_per_unit(self) -> int:
        return 1 if self.attention_layers else 0

    @property
    def resumable(self) -> str:
        """Where work can resume: at every page of a model without recurrent layers, else at checkpoints."""
        return "checkpoints" if self.state.parts else "every_page"

    def layout(self, memory_bytes: int, state_fraction: float | None = None) -> CacheLayout:
        """What `memory_bytes` hold. A `state_fraction` makes it two static pools, else there is one.

        Raises ConfigError where the memory holds no page.
        """
        n_pages = memory_bytes // self.page_bytes
        if n_pages < 1:
            raise ConfigError(f"memory is {memory_bytes:,} bytes, one page of this model is {self.page_bytes:,}")
        return CacheLayout(
            n_pages=n_pages,
            page_size=self.page_size,
            unit_tokens=self.page_size,
            unit_bytes=4 * self.page_size,
            kv_pages_per_unit=self.kv_pages_per_unit,
            checkpoint_pages=self.checkpoint_pages,
            slot_pages=self.slot_pages,
            resumable=self.resumable,
            state_fraction=state_fraction,
            flops=self.flops,
        )

    def parameters_by_kind(self) -> dict[str, int]:
        """Elements of all weights, by the kind of layer that holds them."""
        count = {"embedding": self.vocab_size * self.hidden_size, "norm": self.hidden_size}
        count["head"] = 0 if self.tied else count["embedding"]
        for kind in self.mixers + self.ffns:
            count[kind] = count.get(kind, 0) + _PARAMETERS[kind](self)
        count["norm"] += 2 * self.hidden_size * len(self.mixers)
        return count

    @property
    def parameter_bytes(self) -> int:
        return sum(self.parameters_by_kind().values()) * self.element_bytes

    def flops_by_kind(self, start: int, end: int) -> dict[str, int]:
        """FLOPs to prefill tokens [start, end) after a prefix of `start`, by kind of layer; the head runs once.

        Two a multiply-add; norms, activations and rotation are left out (Marconi, table 1, with the true shapes).
        """
        flops = {"head": 2 * self.hidden_size * self.vocab_size if end > start else 0}
        for kind in self.mixers + self.ffns:
            flops[kind] = flops.get(kind, 0) + _FLOPS[kind](self, start, end)
        return flops

    @property
    def flops(self) -> PrefillFlops:
        """FLOPs of a prefill without its row of logits: a + b and 2a + 4b of one token and of two give a and b."""
        one, two = (self.prefill_flops(0, n) - self.flops_by_kind(0, n)["head"] for n in (1, 2))
        quadratic = (two - 2 * one) / 2
        return PrefillFlops(one - quadratic, quadratic)

    def prefill_flops(self, start: int, end: int) -> int:
        """FLOPs to prefill tokens [start, end) after a prefix of `start` tokens, and one row of logits."""
        return sum(self.flops_by_kind(start, end).values())


def _read_mixers(keys: ConfigKeys) -> tuple[str, ...]:
    n = keys.positive("num_hidden_layers")
    if n > MAX_LAYERS:
        raise CheckpointError(f"config.json: key 'num_hidden_layers' is {n:,}, at most {MAX_LAYERS:,} are taken")
    interval = keys.positive("full_attention_interval", 4)
    regular = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(n)]
    names = keys.listed("layer_types", regular)
    if len(names) != n:
        raise CheckpointError(f"config.json: key 'layer_types' has {len(names)} entries for {n} layers")
    for name in names:
        if not isinstance(name, str) or name not in MIXER_OF_LAYER_TYPE:
            raise CheckpointError(f"config.json: layer type {name!r} is not one of {sorted(MIXER_OF_LAYER_TYPE)}")
    return tuple(MIXER_OF_LAYER_TYPE[name] for name in names)


def _read_ffns(keys: ConfigKeys, n_layers: int, moe: MoeShape | None) -> tuple[str, ...]:
    step = keys.positive("decoder_sparse_step", 1)
    dense = keys.listed("mlp_only_layers", [])
    return tuple("moe" if moe and i not in dense and (i + 1) % step == 0 else "mlp" for i in range(n_layers))


def _read_attention(keys: ConfigKeys) -> AttentionShape:
    keys.divides("num_key_value_heads", "num_attention_heads")
    heads = keys.positive("num_attention_heads")
    head_dim = keys.positive("head_dim", keys.positive("hidden_size") // heads)
    rotary_dim = int(head_dim * keys.number("partial_rotary_factor", 0.25))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise CheckpointError(
            f"config.json: {rotary_dim} of {head_dim} channels rotate, must be an even number of them"
        )
    return AttentionShape(
        heads=heads,
        kv_heads=keys.positive("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=keys.number("rope_theta", 10_000.0),
    )


def _read_delta_net(keys: ConfigKeys) -> DeltaNetShape:
    keys.divides("linear_num_key_heads", "linear_num_value_heads")
    return DeltaNetShape(
        k_heads=keys.positive("linear_num_key_heads"),
        v_heads=keys.positive("linear_num_value_heads"),
        k_dim=keys.positive("linear_key_head_dim"),
        v_dim=keys.positive("linear_value_head_dim"),
        conv_kernel=keys.positive("linear_conv_kernel_dim"),
    )


def _read_moe(keys: ConfigKeys) -> MoeShape | None:
    experts = keys.integer("num_experts", 0)
    if not experts:
        return None
    per_token = keys.positive("num_experts_per_tok")
    if per_token > experts:
        raise CheckpointError(f"config.json: {per_token} experts a token of {experts} experts")
    return MoeShape(
        experts=experts,
        per_token=per_token,
        intermediate=keys.positive("moe_intermediate_size"),
        shared_intermediate=keys.positive("shared_expert_intermediate_size"),
        normalise=keys.flag("norm_topk_prob", True),
    )


def _state_layout(mixers: tuple[str, ...], shape: DeltaNetShape, dtype: str) -> StateLayout:
    parts: list[tuple[int, str, tuple[int, ...], str]] = []
    for layer, kind in enumerate(mixers):
        if kind == "gated_delta_net":
            parts.append((layer, "recurrent", (shape.v_heads, shape.k_dim, shape.v_dim), "float32"))
            parts.append((layer, "conv", (shape.channels, shape.conv_kernel - 1), dtype))
    return StateLayout.of(parts)


def _attention_weights(spec: ModelSpec) -> int:
    """Elements of the projections: queries with their gates, keys and values, and the output."""
    a = spec.attention
    return spec.hidden_size * (3 * a.heads + 2 * a.kv_heads) * a.head_dim


def _delta_net_weights(spec: ModelSpec) -> int:
    """Elements of the projections: queries, keys, values, the gate z, decay and beta, and the output."""
    d = spec.delta_net
    return spec.hidden_size * (d.channels + 2 * d.v_heads * d.v_dim + 2 * d.v_heads)


def _expert_weights(spec: ModelSpec, experts: int) -> int:
    """Elements of router, that many experts, and the shared expert with its gate."""
    assert spec.moe is not None
    widths = experts * spec.moe.intermediate + spec.moe.shared_intermediate
    return spec.hidden_size * (3 * widths + spec.moe.experts + 1)


def _attention_flops(spec: ModelSpec, start: int, end: int) -> int:
    pairs = (end * (end + 1) - start * (start + 1)) // 2  # of a query and a key that it may see
    width = spec.attention.heads * spec.attention.head_dim
    return 2 * (end - start) * _attention_weights(spec) + 4 * width * pairs


def _delta_net_flops(spec: ModelSpec, start: int, end: int) -> int:
    """Decay (1), S^T k, rank-one update and S^T q (2 each) on every element of the state, a token."""
    d = spec.delta_net
    recurrence = 7 * d.v_heads * d.k_dim * d.v_dim + 2 * d.channels * d.conv_kernel
    return (end - start) * (2 * _delta_net_weights(spec) + recurrence)


_PARAMETERS: dict[str, Callable[[ModelSpec], int]] = {
    "attention": lambda spec: _attention_weights(spec) + 2 * spec.attention.head_dim,
    "gated_delta_net": lambda spec: (
        _delta_net_weights(spec)
        + spec.delta_net.channels * spec.delta_net.conv_kernel
        + 2 * spec.delta_net.v_heads
        + spec.delta_net.v_dim
    ),
    "mlp": lambda spec: 3 * spec.hidden_size * spec.intermediate_size,
    "moe": lambda spec: _expert_weights(spec, spec.moe.experts if spec.moe else 0),
}

_FLOPS: dict[str, Callable[[ModelSpec, int, int], int]] = {
    "attention": _attention_flops,
    "gated_delta_net": _delta_net_flops,
    "mlp": lambda spec, start, end: 6 * (end - start) * spec.hidden_size * spec.intermediate_size,
    "moe": lambda spec, start, end: 2 * (end - start) * _expert_weights(spec, spec.moe.per_token if spec.moe else 0),
}
