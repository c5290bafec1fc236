"""The lab's profile of a model: layers and their counts, and their costs in bytes and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headwater.errors import ConfigError
from headwater.layers.layer import Layer
from headwater.plan import CacheLayout
from headwater.spec import ModelCosts, Packed
from headwater.state_layout import BYTES_OF_DTYPE

BYTES_OF_WEIGHT = BYTES_OF_DTYPE | {"float8": 1}
BLOCK_BYTES = 8  # of a recorded block's id
ELASTIC_BYTES = 2 * 1024 * 1024  # what two elastic pools trade at once: CUDA's smallest page of virtual memory
FLOAT32_ASSUMED = "states are taken to be float32: the configuration does not say"


@dataclass(frozen=True)
class Profile(ModelCosts):
    """Costs of a model. Bytes and FLOPs are totals over all `tensor_parallel` devices."""

    name: str
    source: str
    hidden_size: int
    vocab_size: int  # 0: embedding and head are not counted
    layers: tuple[tuple[Layer, int], ...]  # each kind of layer, and how many there are
    dtype_name: str = "bfloat16"  # of the computation, KV and convolutions' states
    weight_dtype: str = "bfloat16"  # of weights that are not quantised; if 8 bits, not of embedding and head
    weights: str = "auto"  # how weights of products are held: as `weight_dtype` says, int8 or int4
    packed: Packed | None = None  # of a quantised checkpoint
    state_dtype: str = "float32"  # of recurrent states
    tied: bool = False  # the head's weight is the embedding's
    tensor_parallel: int = 1
    note: str = ""
    norms: int = 0  # of the model's width; 0: one before each layer, and one before the head

    @classmethod
    def of(cls, name: str, source: str, vocab_size: int, *layers: tuple[Layer, int], **fields: Any) -> Profile:
        """Return a profile as wide as its layers; `fields` are the optional ones."""
        return cls(name, source, layers[0][0].hidden, vocab_size, layers, **fields)

    @property
    def counted(self) -> tuple[tuple[Layer, int], ...]:
        """Each kind of layer, and the number of its layers."""
        return self.layers

    @property
    def norm_count(self) -> int:
        """Norms of the model's width."""
        return self.norms or 1 + sum(n for _, n in self.layers)

    @property
    def composes(self) -> bool:
        """True if prompts can be composed of stored segments."""
        return all(layer.composes for layer, _ in self.layers)

    @property
    def weight_element_bytes(self) -> int:
        return BYTES_OF_WEIGHT[self.weight_dtype]

    @property
    def multiplies(self) -> str:
        """Data type of products: that of the computation, or float8."""
        return "float8" if self.weight_dtype == "float8" else self.dtype_name

    @property
    def stored_table_bytes(self) -> int:
        """Bytes of one element of embedding and head; those of a profile in float8 are held in 16 bits."""
        return BYTES_OF_DTYPE.get(self.weight_dtype, self.element_bytes)

    @property
    def head_bytes(self) -> int:
        """Bytes of the head's weights, which a step with logits reads in addition."""
        return round(self.vocab_size * self.hidden_size * self.table_element_bytes)

    def mtp_bytes_of_page(self, page_size: int) -> int:
        """Return the bytes of a page's entries of an MTP head: an attention layer's KV, and a token's hidden state."""
        widest = max(layer.kv_elements(self.tensor_parallel) for layer, _ in self.layers)
        return self.element_bytes * (page_size * widest + self.hidden_size)

    def layout(
        self,
        memory_bytes: int,
        page_size: int = 64,
        block_tokens: int = 1,
        state_fraction: float | None = None,
        elastic: bool = False,
        slots: int = 1,
        tails: bool = True,
    ) -> CacheLayout:
        """Return the layout of `memory_bytes`; `block_tokens` per recorded block, `slots` states per running request.

        There are no tails within recorded blocks, whose tokens are unknown, nor in pools with a state fraction.
        Raises ConfigError if the memory holds no page, a recorded block is not a whole number of pages, or a pool would
        have none.
        """
        if page_size < 1 or block_tokens < 1:
            raise ConfigError(f"a page of {page_size} tokens and blocks of {block_tokens}: both must be at least 1")
        if state_fraction is not None and not 0 < state_fraction < 1:
            raise ConfigError(f"state fraction is {state_fraction}, must be between 0 and 1")
        if block_tokens > 1 and block_tokens % page_size:
            raise ConfigError(f"a block of the trace has {block_tokens} tokens, no multiple of a page of {page_size}")
        layout = self.unified_layout(memory_bytes, page_size)
        if block_tokens > 1:
            layout = replace(layout, unit_tokens=block_tokens, unit_bytes=BLOCK_BYTES)
        return replace(
            layout,
            slot_pages=slots * layout.slot_pages,
            state_fraction=state_fraction,
            elastic_pages=-(-ELASTIC_BYTES // self.bytes_of_page(page_size)) if elastic else 0,
            tail_pages=layout.tail_pages if tails and block_tokens == 1 and state_fraction is None else (),
        )
