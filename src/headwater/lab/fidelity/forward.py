"""Forward passes of one prompt without the engine: whole, or composed of segments; with or without attention.

T tokens of the prompt, N rows of a step, C channels, V vocabulary, X shape of a layer's state, W elements that a layer
keeps of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch

from headwater.cache.segments.compose import METHODS, Widths, computed_tokens, relevant, runs, usable
from headwater.lab.fidelity.prompts import Prompt
from headwater.memory.arena import Arena
from headwater.memory.slots import LaidOut, Segment, StateMemory
from headwater.mixers.batch import StepBatch
from headwater.mixers.slices import Slice
from headwater.mixers.window import Rings
from headwater.models.hybrid import Function, HybridModel, Mixers, Step
from headwater.plan import Run
from headwater.request import Fidelity, Span

PROMPT, SEGMENT, HEAD = range(3)  # rows of the state memory; the last one: after the segment's head


@dataclass(frozen=True, slots=True)
class Recipe:
    """The segments of one prompt that are composed, with seams of the same widths, and those that are computed."""

    widths: Widths
    carries: bool = True  # whether transitions are applied
    whole: frozenset[int] = frozenset()  # indices of the segments of which nothing is reused

    @classmethod
    def of(cls, fidelity: Fidelity, conv_taps: int, prompt: Prompt) -> Recipe:
        """Choose as the server does for this prompt."""
        method, spans = METHODS[fidelity], prompt.segments
        anew = relevant(prompt.key, spans, method.whole_of(len(spans)))
        whole = frozenset(i for i, span in enumerate(spans) if span in anew)
        return cls(method.widths(conv_taps), method.carries, whole)

    def composed(self, prompt: Prompt) -> tuple[Span, ...]:
        """Return the segments that are reused; one at the prompt's end, or without an interior, never is."""
        spans = (span for i, span in enumerate(prompt.segments) if i not in self.whole)
        return usable(spans, self.widths, 0, len(prompt.tokens) - 1)


@dataclass(frozen=True)
class Computed:
    """States, keys, values and logits after a prompt."""

    states: Mapping[int, torch.Tensor]  # by recurrent layer, after the last token: [X]
    kept: Mapping[int, tuple[torch.Tensor, ...]]  # by attention layer, of the prompt's tokens: [T, W] each
    windows: Mapping[int, tuple[torch.Tensor, ...]]  # by layer with a window, of its last tokens, likewise
    logits_V: torch.Tensor  # of the next token
    anew: int  # tokens that were computed


class Workbench:
    """A model with memory for one prompt of at most `tokens` tokens, and for a segment of it."""

    def __init__(self, model: HybridModel, tokens: int) -> None:
        self.model, spec = model, model.spec
        n_pages = -(-tokens // spec.page_size)
        self.arena = Arena(spec, 2 * n_pages)
        self.prompt_table, self.segment_table = torch.arange(2 * n_pages).chunk(2)
        self.states = StateMemory(spec.state, 3, max(1, spec.state.bytes))
        self.transitions = StateMemory(spec.transition, 1, max(1, spec.transition.bytes))

    def whole(self, prompt: Prompt) -> Computed:
        return self._run(prompt, (Run(0, len(prompt.tokens), ()),), (), ())

    def composed(self, prompt: Prompt, recipe: Recipe) -> Computed:
        """Compute each reused segment by itself, and compose the prompt of them."""
        spans = recipe.composed(prompt)
        segments = [self._built(prompt, span, recipe) for span in spans]
        return self._run(prompt, runs(spans, recipe.widths, 0, len(prompt.tokens)), spans, segments)

    def _built(self, prompt: Prompt, span: Span, recipe: Recipe) -> Segment:
        """Compute a segment by itself: return its states, and write its KV at its place in the prompt."""
        model, tokens = self.model, prompt.tokens[span.start : span.end]
        head, end = recipe.widths.head, len(tokens) - recipe.widths.tail
        self.states.zero(SEGMENT)
        self.states.zero(HEAD)
        model.identities(self.transitions, 0)
        slices = [Slice(head, end - head, head, SEGMENT, self.segment_table, 0, transition=0)]
        if head:
            slices.insert(0, Slice(0, head, 0, SEGMENT, self.segment_table, 0, saves=((head, HEAD),)))
        self._step(tokens[:end], slices, ())
        model.zero_start(self.states, HEAD, SEGMENT, self.transitions, 0)
        model.place(self.arena, self.segment_table, self.prompt_table, head, end, span.start)
        spec = model.spec
        states = LaidOut(spec.state, self.states.bytes_RB[SEGMENT].clone())
        transitions = LaidOut(spec.transition, self.transitions.bytes_RB[0].clone())
        return Segment(range(head, end), states, transitions if recipe.carries else None)

    def _run(
        self, prompt: Prompt, found: Sequence[Run], spans: Sequence[Span], segments: Sequence[Segment]
    ) -> Computed:
        slices: list[Slice] = []
        tokens: list[int] = []
        for run in found:
            composes = tuple((i, spans[i].start) for i in run.composed)
            length = run.end - run.start
            slices.append(Slice(len(tokens), length, run.start, PROMPT, self.prompt_table, 0, composes=composes))
            tokens += prompt.tokens[run.start : run.end]
        self.states.zero(PROMPT)
        logits_V = self._step(tokens, slices, segments)
        n_tokens, mixers = len(prompt.tokens), self.model.mixers
        return Computed(
            {layer: self.states.view(layer, "recurrent")[PROMPT].clone() for layer in mixers.recurrent},
            {layer: self.arena.read(layer, self.prompt_table, 0, n_tokens) for layer in mixers.attention},
            {layer: self._window(layer, mixer.shape.window, n_tokens) for layer, mixer in mixers.windows.items()},
            logits_V,
            computed_tokens(found),
        )

    def _window(self, layer: int, window: int, n_tokens: int) -> tuple[torch.Tensor, ...]:
        """Return keys and values of the prompt's last tokens."""
        rings = (Rings(self.states.view(layer, name)) for name in ("keys", "values"))
        return tuple(ring.read(PROMPT, max(0, n_tokens - window), n_tokens).flatten(1) for ring in rings)

    def _step(self, tokens: Sequence[int], slices: Sequence[Slice], segments: Sequence[Segment]) -> torch.Tensor:
        """Run one step; returns the logits after the last token."""
        none = torch.empty(0, dtype=torch.int64)
        position_N = torch.cat([torch.arange(s.start, s.end) for s in slices])
        last = torch.tensor([len(tokens) - 1])
        batch = StepBatch(torch.tensor(tokens), position_N, tuple(slices), none, (), last)
        return self.model.forward(batch, self.arena, self.states, segments, self.transitions)[0]


def with_attention(model: HybridModel, change: Callable[[int, Function], Function]) -> HybridModel:
    """Return the same model with the function of each attention layer, with or without a window, changed."""
    attention = {*model.mixers.attention, *model.mixers.windows}
    changed, blocks, layer = copy(model), [], 0
    for block in model.blocks:
        functions = []
        for function in block.functions:
            functions.append(change(layer, function) if layer in attention else function)
            layer += 1
        blocks.append(replace(block, functions=tuple(functions)))
    changed.blocks = blocks
    return changed


def without_attention(model: HybridModel) -> HybridModel:
    """Return the model, with the same weights, without attention (HYPIC, section 6.3, table 4).

    Attention layers add nothing to the residual stream and keep nothing.
    """

    def nothing(x_NC: torch.Tensor, step: Step) -> torch.Tensor:
        return torch.zeros_like(x_NC)

    skipping = with_attention(model, lambda layer, function: nothing)
    skipping.mixers = Mixers(model.mixers.recurrent, {}, {})
    return skipping
