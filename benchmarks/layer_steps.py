"""Speed of one decode step of each kind of layer, with the classes that serve it here.

    python -m benchmarks.layer_steps [--repeats 7] [--threads 2] [--small]

A step computes one token of each of several sequences. Several layers of a kind are computed in turn, so many that no
cache holds what they read: weights (of experts those that are expected to be chosen), states and KV, in GB/s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks import measure
from benchmarks.measure import Row, timed
from benchmarks.mixer_layers import LAYERS, WIDTH, random_weight
from headwater import machine
from headwater.layers.architecture import Architecture, Block, Part
from headwater.layers.attention import GroupedAttention, Rotary, WindowAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.gdn import DeltaNet
from headwater.layers.layer import Layer
from headwater.layers.mla import LatentAttention
from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.memory.tails import TailMemory
from headwater.mixers.batch import StepBatch
from headwater.mixers.slices import Slice
from headwater.mixers.weights import Weights
from headwater.models.build import layer_classes, layer_function
from headwater.models.hybrid import Function, Step
from headwater.spec import ModelSpec

FULL = GroupedAttention(WIDTH, 8, 2, 256, gated=True, normed=True, rotary=Rotary(64, 1e7))
KINDS: dict[str, Layer] = {
    **{name: compared.layer for name, compared in LAYERS.items()},
    "Gated DeltaNet": DeltaNet(WIDTH, 16, 16, 128, 128, 4),  # as in Qwen3.5-0.8B, like the next ones
    "attention": FULL,
    "MLP": Mlp(WIDTH, 3584),
    "window of 1,024": WindowAttention.of(replace(FULL, gated=False), 1024),
    "latent attention": LatentAttention(WIDTH, 16, 512, 128, 64, 128, Rotary(64)),
    "experts, 8 of 64": Experts(WIDTH, 64, 8, 512, shared=512),
}
SEQUENCES = (1, 8)
CONTEXTS, SMALL_CONTEXTS = (512, 8192), (128,)  # tokens
IN_TURN, SMALL_IN_TURN, MOST_LAYERS = 10**8, 10**6, 24  # bytes read by layers in turn
FILL = 0x3D  # of all bytes of pages and states: a number about 0.05 in either dtype


@dataclass(frozen=True)
class Kind:
    """Layers of one kind, and the spec of a model of them."""

    spec: ModelSpec
    functions: list[Function]
    dtype: torch.dtype

    @classmethod
    def of(cls, layer: Layer, in_turn: int, dtype: torch.dtype) -> Kind:
        n_layers = min(MOST_LAYERS, max(1, in_turn // (dtype.itemsize * round(layer.weights_read(1)))))
        blocks = tuple(Block("norm", (Part(layer, f"layers.{i}"),)) for i in range(n_layers))
        dtype_name = str(dtype).removeprefix("torch.")
        spec = ModelSpec.of(Architecture("layers", 64, WIDTH, blocks, 2 * max(CONTEXTS), 1e-6), dtype_name)
        stored = {name: random_weight(name, shape).to(dtype) for name, shape in layer.tensors().items()}
        return cls(spec, [layer_function(i, layer, Weights(stored, dtype)) for i in range(n_layers)], dtype)

    def step(self, n_sequences: int, context: int) -> Callable[[], object]:
        """Return a function that computes the next token of sequences with so many tokens."""
        pages = -(-(context + 1) // self.spec.page_size)
        arena = Arena(self.spec, n_sequences * pages)
        arena.pages.fill_(FILL)
        states = self._states(n_sequences)
        batch = StepBatch(
            token_N=torch.zeros(n_sequences, dtype=torch.int64),
            position_N=torch.full((n_sequences,), context),
            slices=(),
            decode_slot_B=torch.arange(n_sequences),
            decode_tables=torch.arange(n_sequences * pages).view(n_sequences, pages).unbind(),
            logits_row_R=torch.arange(0),
        )
        attention = layer_classes("cpu").attention_step.of(batch, arena, self.dtype)
        step = Step(batch, attention if self.spec.attention_layers else None, states, self.dtype, (), None)
        x_BC = torch.randn(n_sequences, WIDTH).to(self.dtype)
        return lambda: [function(x_BC, step) for function in self.functions]

    def leg(self, page: int, kept: int, rows: int) -> Callable[[], object]:
        """Return a function that computes the next rows of a sequence, after `kept` tokens of a tail after a page."""
        start, pages = page + kept, -(-(page + kept + rows) // self.spec.page_size)
        arena, states, tails = Arena(self.spec, pages), self._states(1), TailMemory(self.spec, 1)
        for memory in (arena.pages, tails.bytes_RB):
            memory.fill_(FILL)
        table_P, none = torch.arange(pages), torch.arange(0)
        one = Slice(0, rows, start, 0, table_P, page // self.spec.page_size, kept=kept)
        batch = StepBatch(torch.zeros(rows, dtype=torch.int64), start + torch.arange(rows), (one,), none, (), none)
        attention = layer_classes("cpu").attention_step.of(batch, arena, self.dtype)
        step = Step(batch, attention if self.spec.attention_layers else None, states, self.dtype, tails=tails)
        x_NC = torch.randn(rows, WIDTH).to(self.dtype)
        return lambda: [function(x_NC, step) for function in self.functions]

    def _states(self, n_sequences: int) -> StateMemory:
        states = StateMemory(self.spec.state, n_sequences, max(1, self.spec.checkpoint_pages) * self.spec.page_bytes)
        states.bytes_RB.fill_(FILL)
        return states

    def bytes_read(self, n_sequences: int, context: int) -> float:
        """Bytes that a step reads."""
        weights = sum(layer.weights_read(n_sequences) for layer in self.spec.layers) * self.dtype.itemsize
        return weights + n_sequences * (self.spec.checkpoint_bytes + context * self.spec.kv_bytes_per_token)


def rows_of(name: str, kind: Kind, contexts: tuple[int, ...], turns: int) -> list[Row]:
    """Return a step's time in each layer; contexts matter to layers that keep KV."""
    contexts = contexts if kind.spec.attention_layers else contexts[:1]
    cases = {(n, context): kind.step(n, context) for n in SEQUENCES for context in contexts}
    figures = measure.in_turns({f"{n} {context}": timed(step) for (n, context), step in cases.items()}, turns)
    rows = []
    for n, context in cases:
        after = f" after {context:,} tokens" if kind.spec.attention_layers else ""
        what, seconds = f"{name}, {n} sequence{'s' * (n > 1)}{after}", figures[f"{n} {context}"]
        rows.append(Row(what, "us", [1e6 * s / len(kind.functions) for s in seconds]))
        rows.append(Row(what, "GB/s", [kind.bytes_read(n, context) / s / 1e9 for s in seconds]))
    return rows


def main() -> None:
    given = measure.options(__doc__, "layer_steps", repeats=7)
    torch.manual_seed(given.seed)
    dtype = torch.bfloat16 if machine.cpu().native_bfloat16 else torch.float32
    contexts, in_turn = (SMALL_CONTEXTS, SMALL_IN_TURN) if given.small else (CONTEXTS, IN_TURN)
    rows: list[Row] = []
    with torch.inference_mode():
        for name, layer in KINDS.items():
            rows += rows_of(name, Kind.of(layer, in_turn, dtype), contexts, given.repeats)
    layers = {name: repr(layer) for name, layer in KINDS.items()}
    measure.report(given, rows, layers=layers, dtype=str(dtype).removeprefix("torch."))


if __name__ == "__main__":
    main()
