"""Costs of a model, in bytes and FLOPs: all sizes are computed here and in `layers/`. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from headwater.errors import CheckpointError, ConfigError
from headwater.layers.architecture import Architecture, Part
from headwater.layers.feed_forward import Experts
from headwater.layers.layer import GROUP, Layer
from headwater.plan import CacheLayout, PrefillFlops
from headwater.state_layout import BYTES_OF_DTYPE, StateLayout, TailLayout

PAGE_ALIGN_BYTES = 512
PAGE_BYTES_WITHOUT_KV = 64 * 1024
MAX_STATE_SHARE = 1 / 8  # of a page's KV: states that take more are stored as checkpoints
KEY_BLOCK = 512  # tokens: an attention's bits depend on the length of its last block of keys, so it is always full
WEIGHTS = ("auto", "int8", "int4")  # how weights are held; auto: as stored
# of a quantised weight's element: its code, and for each group a float16 scale and a zero of 8 bits
QUANTISED_BYTES = {"int8": 1 + 3 / GROUP, "int4": 0.5 + 3 / GROUP}
TABLES = {"int8": "int8", "int4": "int8"}  # format of embedding and head by that of products
FLOAT8 = "float8"  # format of numbers with a sign, 4 bits of exponent and 3 of mantissa (e4m3)


def aligned(size: int) -> int:
    """Round a number of bytes up to PAGE_ALIGN_BYTES."""
    return -(-size // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES


class Packed(NamedTuple):
    """Format of a quantised checkpoint's weights, and bytes of their elements as they are held, scales included."""

    name: str
    element_bytes: float  # mean of the weights of products
    table_bytes: float | None = None  # of embedding and head, if they are quantised
    experts_only: bool = False  # no other layer's weights are quantised


class ModelCosts(ABC):
    """Bytes and FLOPs of a model, from its layers: the part that `ModelSpec` and the lab's `Profile` share.

    Bytes and FLOPs are totals over all `tensor_parallel` devices.
    """

    hidden_size: int
    vocab_size: int
    dtype_name: str  # of the computation, KV and convolutions' states
    weights: str = "auto"  # how weights of products are held, one of WEIGHTS
    packed: Packed | None = None  # of a checkpoint whose weights are quantised
    tied: bool  # the head's weight is the embedding's
    state_dtype: str = "float32"  # of recurrent states
    tensor_parallel: int = 1

    @property
    @abstractmethod
    def counted(self) -> tuple[tuple[Layer, int], ...]:
        """Layers in the order of work, each with the number of successive ones that are alike."""

    @property
    @abstractmethod
    def norm_count(self) -> int:
        """Norms of the model's width."""

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of KV."""
        return BYTES_OF_DTYPE[self.dtype_name]

    @property
    @abstractmethod
    def weight_element_bytes(self) -> int:
        """Bytes of one element of the layers' weights that are not quantised."""

    @property
    def table_element_bytes(self) -> float:
        """Bytes of one element of embedding and head."""
        if self.packed is not None and self.packed.table_bytes is not None:
            return self.packed.table_bytes
        return self.stored_table_bytes if self.table_format is None else QUANTISED_BYTES[self.table_format]

    @property
    @abstractmethod
    def stored_table_bytes(self) -> int:
        """Bytes of one element of embedding and head that are not quantised."""

    @property
    def table_format(self) -> str | None:
        """Format to which loading rounds embedding and head; None if they stay as stored."""
        return TABLES.get(self.weights) if self.hidden_size % GROUP == 0 else None

    @property
    @abstractmethod
    def weight_dtype(self) -> str:
        """Data type of weights that are not quantised."""

    @property
    def weights_held(self) -> str:
        """Format in which the weights of products are held: int8, int4, float8, a type of GGUF, or a data type."""
        if self.weights != "auto":
            return self.weights
        return self.packed.name if self.packed else self.weight_dtype

    def layer_bytes(self, layer: Layer) -> int:
        """Bytes of a layer's weights as they are held; if loading quantises them, in the smallest groups."""
        return self._bytes(layer, isinstance(layer, Experts))

    def _bytes(self, layer: Layer, of_experts: bool) -> int:
        """Return the bytes of weights that are experts', or another layer's."""
        if self.weights == "auto" and (self.packed is None or (self.packed.experts_only and not of_experts)):
            return layer.weights * self.weight_element_bytes
        element_bytes = QUANTISED_BYTES.get(self.weights) or (self.packed.element_bytes if self.packed else 0)
        quantised = layer.quantised_weights
        return (layer.weights - quantised) * self.weight_element_bytes + round(quantised * element_bytes)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are held."""
        elements = self.parameters_by_kind()
        tables = round((elements["embedding"] + elements["head"]) * self.table_element_bytes)
        norms = elements["norm"] * self.weight_element_bytes
        return tables + norms + sum(n * self.layer_bytes(layer) for layer, n in self.counted)

    def weight_bytes_read(self, tokens: int) -> float:
        """Bytes of weights that a step over `tokens` tokens is expected to read, without embedding and head."""
        return sum(n * (self.layer_bytes(layer) - self.bytes_unread(layer, tokens)) for layer, n in self.counted)

    def bytes_unread(self, layer: Layer, tokens: int) -> float:
        """Bytes of a layer's weights that such a step is expected to leave out: of experts that no token chooses."""
        if not isinstance(layer, Experts):
            return 0.0
        return (layer.experts - layer.hit(tokens)) * self._bytes(layer.expert, of_experts=True)

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV that all layers keep of one token."""
        return self.element_bytes * sum(n * layer.kv_elements(self.tensor_parallel) for layer, n in self.counted)

    def kv_bytes_of_page(self, page_size: int) -> int:
        """Bytes of KV of a page over all attention layers, rounded up to 512; 64 KiB for a model without attention."""
        return aligned(self.kv_bytes_per_token * page_size) or PAGE_BYTES_WITHOUT_KV

    def state_bytes_of_page(self, page_size: int) -> int:
        """Bytes of a page for states, and as much again as a segment's transitions need; 0 if they are elsewhere."""
        state_bytes = aligned(self.state.bytes) + aligned(self.transition.bytes)
        return state_bytes if state_bytes <= MAX_STATE_SHARE * self.kv_bytes_per_token * page_size else 0

    def bytes_of_page(self, page_size: int) -> int:
        """Bytes of a page: of KV, then of states if they are small."""
        return self.kv_bytes_of_page(page_size) + self.state_bytes_of_page(page_size)

    @cached_property
    def state(self) -> StateLayout:
        """Layout of a checkpoint: the states of all layers, each at a multiple of 64 bytes."""
        each = [(i, layer, name, shape) for i, layer in enumerate(self._each) for name, shape in layer.states]
        dtypes = [self.state_dtype if name in layer.float32_states else self.dtype_name for _, layer, name, _ in each]
        return StateLayout.of(
            [(i, name, shape, dtype) for (i, _, name, shape), dtype in zip(each, dtypes, strict=True)]
        )

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint."""
        return self.state.bytes

    @property
    def draft_bytes(self) -> int:
        """Bytes that are kept of a draft until it is judged, instead of the states after it."""
        return self.element_bytes * sum(n * layer.draft_elements for layer, n in self.counted)

    @cached_property
    def transition(self) -> StateLayout:
        """Layout of a segment's transitions, those of all recurrent layers."""
        each = ((i, layer.transition) for i, layer in enumerate(self._each))
        return StateLayout.of([(i, "transition", shape, "float32") for i, shape in each if shape is not None])

    @cached_property
    def tail(self) -> TailLayout:
        """Layout of the rows of a tail."""
        return TailLayout(self.hidden_size, self.element_bytes, tuple((x.kind, x.tail_elements) for x in self._each))

    def tail_bytes(self, tokens: int, page_size: int) -> int:
        """Bytes of a tail of `tokens` tokens, in whole pages, with the page of their KV."""
        page_bytes, has_kv = self.bytes_of_page(page_size), self.kv_bytes_per_token and tokens
        return (self.tail.pages(tokens, page_bytes) + bool(has_kv)) * page_bytes

    @property
    def layers_by_kind(self) -> dict[str, int]:
        """Number of layers of each kind."""
        counts: dict[str, int] = {}
        for layer, n in self.counted:
            counts[layer.kind] = counts.get(layer.kind, 0) + n
        return counts

    def parameters_by_kind(self) -> dict[str, int]:
        """Elements of all weights, by the kind of layer that holds them."""
        count = {"embedding": self.vocab_size * self.hidden_size}
        count["head"] = 0 if self.tied else count["embedding"]
        count["norm"] = self.hidden_size * self.norm_count
        for layer, n in self.counted:
            count[layer.kind] = count.get(layer.kind, 0) + n * layer.weights
        return count

    @cached_property
    def flops(self) -> PrefillFlops:
        """FLOPs of a prefill, without its row of logits."""
        parts = [(layer.flops, n) for layer, n in self.counted]
        return PrefillFlops(sum(n * f.linear for f, n in parts), sum(n * f.quadratic for f, n in parts))

    @property
    def head_flops(self) -> int:
        """FLOPs of one row of logits."""
        return 2 * self.hidden_size * self.vocab_size

    def flops_by_kind(self, start: int, end: int) -> dict[str, int]:
        """FLOPs to prefill tokens [start, end) after a prefix of `start`, by kind of layer; the head runs once."""
        flops = {"head": self.head_flops if end > start else 0}
        for layer, n in self.counted:
            flops[layer.kind] = flops.get(layer.kind, 0) + n * round(layer.flops.between(start, end))
        return flops

    def unified_layout(self, memory_bytes: int, page_size: int) -> CacheLayout:
        """Return the layout of `memory_bytes` as one pool. Raises ConfigError if the memory is smaller than a page."""
        page_bytes = self.bytes_of_page(page_size)
        if memory_bytes < page_bytes:
            raise ConfigError(f"memory is {memory_bytes:,} bytes, one page of this model is {page_bytes:,}")
        state_pages, transition_pages = (-(-part.bytes // page_bytes) for part in (self.state, self.transition))
        states_in_pages = self.state_bytes_of_page(page_size) > 0
        return CacheLayout(
            n_pages=memory_bytes // page_bytes,
            page_size=page_size,
            unit_tokens=page_size,
            unit_bytes=4 * page_size,
            kv_pages_per_unit=1 if self.kv_bytes_per_token else 0,
            checkpoint_pages=0 if states_in_pages else state_pages,
            slot_pages=state_pages,
            transition_pages=0 if states_in_pages else transition_pages,
            resumable="checkpoints" if state_pages and not states_in_pages else "every_page",
            states_in_pages=states_in_pages,
            flops=self.flops,
            tail_pages=tuple(self.tail.pages(n, page_bytes) for n in range(page_size + 1)),
        )

    @property
    def _each(self) -> Iterator[Layer]:
        """All layers in the order of work."""
        return (layer for layer, n in self.counted for _ in range(n))


@dataclass(frozen=True)
class ModelSpec(Architecture, ModelCosts):
    """An architecture with its serving dtype and page size, and the costs that follow from them."""

    dtype_name: str = "float32"
    weights: str = "auto"
    stored_dtype: str = "float32"  # of the checkpoint's weights
    packed: Packed | None = None
    page_size: int = 64  # tokens a page

    @classmethod
    def of(
        cls, architecture: Architecture, dtype: str, page_size: int = 64, weights: str = "auto", stored: str = ""
    ) -> ModelSpec:
        """Build a spec of a checkpoint with weights in the dtype `stored`, without it in `dtype`.

        Raises CheckpointError for a page size that is not a multiple of 64, or an unknown format."""
        if page_size <= 0 or page_size % 64:
            raise CheckpointError(f"page size is {page_size}, must be a multiple of 64")
        if dtype not in BYTES_OF_DTYPE:
            raise CheckpointError(f"dtype is {dtype!r}, must be one of {', '.join(BYTES_OF_DTYPE)}")
        if weights not in WEIGHTS:
            raise CheckpointError(f"weights are {weights!r}, must be one of {', '.join(WEIGHTS)}")
        stored = stored if stored in BYTES_OF_DTYPE else dtype
        return cls(**vars(architecture), dtype_name=dtype, weights=weights, stored_dtype=stored, page_size=page_size)

    @cached_property
    def of_mtp(self) -> ModelSpec:
        """The blocks of the MTP head as a model of their own. Raises CheckpointError if the family has none."""
        if self.mtp is None:
            raise CheckpointError(f"models of type {self.model_type!r} have no MTP head")
        return replace(self, blocks=self.mtp.blocks, final_norm=self.mtp.final_norm, prefixes=("",), mtp=None)

    @property
    def mtp_page_bytes(self) -> int:
        """Bytes of a page's entries of the MTP head, with its last token's hidden state; 0 if the family has none."""
        return 0 if self.mtp is None else self.of_mtp.page_bytes + self.hidden_size * self.element_bytes

    @property
    def weight_dtype(self) -> str:
        """Data type of weights that are not quantised: as stored, unless it is longer than that of the computation."""
        return min(
            self.dtype_name, self.stored_dtype, key=lambda name: (BYTES_OF_DTYPE[name], name != self.stored_dtype)
        )

    @property
    def weight_element_bytes(self) -> int:
        return BYTES_OF_DTYPE[self.weight_dtype]

    @property
    def stored_table_bytes(self) -> int:
        return self.weight_element_bytes

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All layers in the order of computation. A layer's index here is its number in state memory and arena."""
        return tuple(part for block in self.blocks for part in block.parts)

    @cached_property
    def counted(self) -> tuple[tuple[Layer, int], ...]:
        """Layers in the order of work, one by one."""
        return tuple((layer, 1) for layer in self.layers)

    @property
    def norm_count(self) -> int:
        """Norms of the model's width: one a block, and one before the head."""
        return 1 + len(self.blocks)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(part.layer for part in self.parts)

    @property
    def conv_taps(self) -> int:
        """Taps of the widest convolution before a recurrence; 1 if there is none."""
        return self.state.conv_taps

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that store keys, values or latents per token in the arena."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.kv_widths)

    @cached_property
    def routes(self) -> bool:
        """True if the model has layers with routed experts."""
        return any(isinstance(layer, Experts) for layer in self.layers)

    @property
    def page_bytes(self) -> int:
        """KV of one page over all attention layers, rounded up to 512 bytes; 64 KiB if the model has none."""
        return self.bytes_of_page(self.page_size)

    @property
    def states_in_pages(self) -> bool:
        """True if each page has the states after its last token, after its KV."""
        return self.state_bytes_of_page(self.page_size) > 0

    @property
    def state_place(self) -> tuple[int, slice]:
        """Bytes of a checkpoint as it is stored, and which bytes of a page that is: all, or some after its KV."""
        kv_bytes, size = self.kv_bytes_of_page(self.page_size), aligned(self.state.bytes)
        return (size, slice(kv_bytes, kv_bytes + size)) if self.states_in_pages else self._pages(self.checkpoint_pages)

    @property
    def transition_place(self) -> tuple[int, slice]:
        """The same of a segment's transitions."""
        first, size = self.page_bytes - aligned(self.transition.bytes), aligned(self.transition.bytes)
        return (size, slice(first, first + size)) if self.states_in_pages else self._pages(self.transition_pages)

    def _pages(self, n: int) -> tuple[int, slice]:
        return n * self.page_bytes, slice(None)

    @property
    def checkpoint_pages(self) -> int:
        return -(-self.checkpoint_bytes // self.page_bytes)

    @property
    def transition_pages(self) -> int:
        """Pages that a segment's transitions take."""
        return -(-self.transition.bytes // self.page_bytes)

    def layout(self, memory_bytes: int) -> CacheLayout:
        """Return the page layout of `memory_bytes`. Raises ConfigError if the memory is smaller than a page."""
        return self.unified_layout(memory_bytes, self.page_size)

    def prefill_flops(self, start: int, end: int) -> int:
        """FLOPs to prefill tokens [start, end) after a prefix of `start` tokens, and one row of logits."""
        return sum(self.flops_by_kind(start, end).values())
