"""Runs a prompt whole, or composed of segments, and tells what is in memory after its last token.

T tokens of the prompt, V vocabulary, X shape of a layer's state, W elements that a layer keeps of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from headwater.cache.segments.compose import computed_tokens, runs
from headwater.evaluate.fidelity.prompt import Prompt
from headwater.evaluate.fidelity.recipe import Recipe
from headwater.memory.arena import Arena
from headwater.memory.segments import LaidOut, Segment
from headwater.memory.slots import StateMemory
from headwater.mixers.batch import Slice, StepBatch
from headwater.mixers.window.rings import Rings
from headwater.models.hybrid import HybridModel
from headwater.plan import Run
from headwater.request import Span

PROMPT, SEGMENT, HEAD = range(3)  # rows of the state memory; the last one: after the segment's head


@dataclass(frozen=True)
class Computed:
    """What is there after a prompt."""

    states: Mapping[int, torch.Tensor]  # recurrent layer -> its state [X] after the last token
    kept: Mapping[int, tuple[torch.Tensor, ...]]  # attention layer -> what it keeps of the tokens, [T, W] each
    windows: Mapping[int, tuple[torch.Tensor, ...]]  # layer with a window -> of the last tokens, in order, likewise
    logits_V: torch.Tensor  # of the next token
    anew: int  # tokens that were computed


class Workbench:
    """A model with memory for one prompt of at most so many tokens, and for a segment of it."""

    def __init__(self, model: HybridModel, tokens: int) -> None:
        self.model, spec = model, model.spec
        n_pages = -(-tokens // spec.page_size)
        self.arena = Arena(spec, 2 * n_pages)
        self.prompt_table, self.segment_table = torch.arange(2 * n_pages).split(n_pages)
        self.states = StateMemory(spec.state, 3, max(1, spec.state.bytes))
        self.transitions = StateMemory(spec.transition, 1, max(1, spec.transition.bytes))

    def whole(self, prompt: Prompt) -> Computed:
        """All of it computed."""
        return self._run(prompt, (Run(0, len(prompt.tokens), ()),), (), ())

    def composed(self, prompt: Prompt, recipe: Recipe) -> Computed:
        """Composed, each segment being computed alone first."""
        spans = recipe.composed(prompt)
        segments = [self._made(prompt, span, recipe) for span in spans]
        return self._run(prompt, runs(spans, recipe.widths, 0, len(prompt.tokens)), spans, segments)

    def _made(self, prompt: Prompt, span: Span, recipe: Recipe) -> Segment:
        """A segment's states, and its KV where the prompt has it."""
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
        """Keys and values of the last of the prompt's tokens."""
        rings = (Rings(self.states.view(layer, name)) for name in ("keys", "values"))
        return tuple(ring.read(PROMPT, max(0, n_tokens - window), n_tokens).flatten(1) for ring in rings)

    def _step(self, tokens: Sequence[int], slices: Sequence[Slice], segments: Sequence[Segment]) -> torch.Tensor:
        """The logits after the last token."""
        none = torch.empty(0, dtype=torch.int64)
        position_N = torch.cat([torch.arange(s.start, s.end) for s in slices])
        last = torch.tensor([len(tokens) - 1])
        batch = StepBatch(torch.tensor(tokens), position_N, tuple(slices), none, (), last)
        return self.model.forward(batch, self.arena, self.states, segments, self.transitions)[0]
