"""A model as the lab knows it: layers and their counts, and what follows from them in bytes and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from headwater.errors import ConfigError
from headwater.layers.layer import Layer
from headwater.plan import CacheLayout, PrefillFlops
from headwater.spec import BYTES_OF_DTYPE, PAGE_ALIGN, PAGE_BYTES_WITHOUT_KV, StateLayout

BYTES_OF_WEIGHT = BYTES_OF_DTYPE | {"float8": 1}
TOKEN_BYTES = 4  # of a token in a key
BLOCK_BYTES = 8  # of a recorded block's id
ELASTIC_BYTES = 2 * 1024 * 1024  # what two elastic pools trade at once: CUDA's smallest page of virtual memory
FLOAT32_ASSUMED = "states are taken to be float32: the configuration does not say"


@dataclass(frozen=True)
class Profile:
    """Costs of a model. Bytes and FLOPs are totals over all `tensor_parallel` devices."""

    name: str
    source: str
    hidden_size: int
    vocab_size: int  # 0: embedding and head are not counted
    layers: tuple[tuple[Layer, int], ...]  # each kind of layer, and how many there are
    dtype_name: str = "bfloat16"  # of KV, convolutions' states, embedding and head
    weight_dtype: str = "bfloat16"  # of the layers' weights
    state_dtype: str = "float32"  # of recurrent states
    tied: bool = False  # the head's weight is the embedding's
    tensor_parallel: int = 1
    note: str = ""
    norms: int = 0  # of the model's width; 0: one before each layer, and one before the head

    @property
    def element_bytes(self) -> int:
        return BYTES_OF_DTYPE[self.dtype_name]

    @cached_property
    def kv_bytes_per_token(self) -> int:
        return self.element_bytes * sum(n * layer.kv_elements(self.tensor_parallel) for layer, n in self.layers)

    @cached_property
    def state(self) -> StateLayout:
        """A checkpoint's parts, each at a multiple of 64 bytes as the engine lays them out."""
        layers = [layer for layer, n in self.layers for _ in range(n)]
        return StateLayout.of(
            [
                (i, name, shape, self.state_dtype if name == "recurrent" else self.dtype_name)
                for i, layer in enumerate(layers)
                for name, shape in layer.states
            ]
        )

    @property
    def transition_bytes(self) -> int:
        """Bytes of a segment's transitions, in the engine's layout."""
        layers = [layer for layer, n in self.layers for _ in range(n)]
        wanted = [(i, "transition", x.transition, "float32") for i, x in enumerate(layers) if x.transition is not None]
        return StateLayout.of(wanted).bytes

    @property
    def composes(self) -> bool:
        """True if prompts can be composed of stored segments."""
        return all(layer.composes for layer, _ in self.layers)

    @property
    def checkpoint_bytes(self) -> int:
        return self.state.bytes

    @cached_property
    def flops(self) -> PrefillFlops:
        """FLOPs of a prefill, without its row of logits."""
        parts = [(layer.flops, n) for layer, n in self.layers]
        return PrefillFlops(sum(n * f.linear for f, n in parts), sum(n * f.quadratic for f, n in parts))

    @property
    def head_flops(self) -> int:
        """FLOPs of one row of logits."""
        return 2 * self.hidden_size * self.vocab_size

    def flops_by_kind(self, start: int, end: int) -> dict[str, float]:
        """FLOPs to prefill tokens [start, end) after a prefix of `start`, by kind of layer; the head runs once."""
        flops: dict[str, float] = {"head": self.head_flops if end > start else 0}
        for layer, n in self.layers:
            flops[layer.kind] = flops.get(layer.kind, 0) + n * layer.flops.between(start, end)
        return flops

    def layers_by_kind(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for layer, n in self.layers:
            counts[layer.kind] = counts.get(layer.kind, 0) + n
        return counts

    def parameters_by_kind(self) -> dict[str, int]:
        """Elements of all weights, by the kind of layer that holds them."""
        count = {"embedding": self.vocab_size * self.hidden_size}
        count["head"] = 0 if self.tied else count["embedding"]
        count["norm"] = self.hidden_size * (self.norms or 1 + sum(n for _, n in self.layers))
        for layer, n in self.layers:
            count[layer.kind] = count.get(layer.kind, 0) + n * layer.weights
        return count

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        layers = sum(n * layer.weights for layer, n in self.layers)
        rest = sum(self.parameters_by_kind().values()) - layers
        return layers * BYTES_OF_WEIGHT[self.weight_dtype] + rest * self.element_bytes

    def weight_bytes_read(self, tokens: int) -> float:
        """Bytes of weights that a step over so many tokens is expected to read, without embedding and head."""
        return BYTES_OF_WEIGHT[self.weight_dtype] * sum(n * layer.weights_read(tokens) for layer, n in self.layers)

    @property
    def head_bytes(self) -> int:
        """Bytes of the head's weights, which a step with logits reads in addition."""
        return self.vocab_size * self.hidden_size * self.element_bytes

    def page_bytes(self, page_size: int) -> int:
        """KV of a page of tokens over all attention layers, rounded up to 512; 64 KiB where there is none."""
        kv_bytes = self.kv_bytes_per_token * page_size
        return -(-kv_bytes // PAGE_ALIGN) * PAGE_ALIGN if kv_bytes else PAGE_BYTES_WITHOUT_KV

    def layout(
        self,
        memory_bytes: int,
        page_size: int = 64,
        block_tokens: int = 1,
        state_fraction: float | None = None,
        elastic: bool = False,
        slots: int = 1,
    ) -> CacheLayout:
        """Return the layout of `memory_bytes`; `block_tokens` per recorded block, `slots` states per running request.

        Raises ConfigError where the memory holds no page, a recorded block is no whole number of them, or a pool would
        be without any.
        """
        if page_size < 1 or block_tokens < 1:
            raise ConfigError(f"a page of {page_size} tokens and blocks of {block_tokens}: both must be at least 1")
        if state_fraction is not None and not 0 < state_fraction < 1:
            raise ConfigError(f"state fraction is {state_fraction}, must be between 0 and 1")
        if block_tokens > 1 and block_tokens % page_size:
            raise ConfigError(f"a block of the trace has {block_tokens} tokens, no multiple of a page of {page_size}")
        page_bytes = self.page_bytes(page_size)
        if memory_bytes < page_bytes:
            raise ConfigError(f"memory is {memory_bytes:,} bytes, one page of this model is {page_bytes:,}")
        unit_tokens = page_size if block_tokens == 1 else block_tokens
        checkpoint_pages = -(-self.checkpoint_bytes // page_bytes)
        return CacheLayout(
            n_pages=memory_bytes // page_bytes,
            page_size=page_size,
            unit_tokens=unit_tokens,
            unit_bytes=TOKEN_BYTES * page_size if block_tokens == 1 else BLOCK_BYTES,
            kv_pages_per_unit=1 if self.kv_bytes_per_token else 0,  # of a page: a unit of u pages has u
            checkpoint_pages=checkpoint_pages,
            slot_pages=slots * checkpoint_pages,
            transition_pages=-(-self.transition_bytes // page_bytes),
            resumable="checkpoints" if self.state.parts else "every_page",
            state_fraction=state_fraction,
            elastic_pages=-(-ELASTIC_BYTES // page_bytes) if elastic else 0,
            flops=self.flops,
        )
