"""How far what was composed is from what was computed whole.

T tokens, V vocabulary, W elements that a layer keeps of a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headwater.evaluate.fidelity.prompt import Prompt
from headwater.evaluate.fidelity.recipe import Recipe
from headwater.evaluate.fidelity.workbench import Computed
from headwater.layers.attention import GroupedAttention
from headwater.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Distance:
    """Of one tensor from another (HYPIC, table 4)."""

    error: float  # ‖composed − whole‖ / ‖whole‖, Frobenius norms
    degrees: float  # the angle between them

    @classmethod
    def of(cls, composed: torch.Tensor, whole: torch.Tensor) -> Distance:
        """Both 0 where they are equal, zeros included; an angle to zeros is 90 degrees."""
        a, b = composed.double().flatten(), whole.double().flatten()
        if torch.equal(a, b):
            return cls(0.0, 0.0)
        norm_a, norm_b = float(a.norm()), float(b.norm())
        error = float((a - b).norm()) / norm_b if norm_b else math.inf
        if not norm_a or not norm_b:
            return cls(error, 90.0)
        a, b = a / norm_a, b / norm_b  # from both chords: an arc cosine sees nothing below 1e-8
        return cls(error, math.degrees(2 * math.atan2(float((a - b).norm()), float((a + b).norm()))))


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt, composed in one way."""

    tokens: int
    anew: int  # tokens that were computed
    divergence: float  # of the next token's distribution from the whole prompt's, KL(whole ‖ composed) in nats
    same_first: bool  # whether the most likely next token is the same
    states: Mapping[int, Distance]  # recurrent layer -> of its state after the last token
    # attention layer -> keys and values (or latents) of reused tokens; with a window, of all that are in it at the end
    kept: Mapping[int, Mapping[str, Distance]]

    @classmethod
    def of(cls, spec: ModelSpec, prompt: Prompt, recipe: Recipe, composed: Computed, whole: Computed) -> Measured:
        """Raises ValueError for logits that are no numbers."""
        widths = recipe.widths
        reused = [t for s in recipe.composed(prompt) for t in range(s.start + widths.head, s.end - widths.tail)]
        mine, its = (_kept(one, reused) for one in (composed, whole))
        return cls(
            tokens=len(prompt.tokens),
            anew=composed.anew,
            divergence=divergence(whole.logits_V, composed.logits_V),
            same_first=bool(whole.logits_V.argmax() == composed.logits_V.argmax()),
            states={layer: Distance.of(state, whole.states[layer]) for layer, state in composed.states.items()},
            kept={
                layer: {
                    name: Distance.of(mine_TW, its_TW)
                    for name, mine_TW, its_TW in zip(_names(spec, layer), mine[layer], its[layer], strict=True)
                }
                for layer in sorted(mine)
            },
        )


def divergence(of_V: torch.Tensor, from_V: torch.Tensor) -> float:
    """Kullback-Leibler divergence of two distributions, given as logits: Σ p (ln p − ln q), in nats, never below 0.

    Raises ValueError for logits that are no numbers.
    """
    p_V, q_V = (logits.double().log_softmax(0) for logits in (of_V, from_V))
    found = float((p_V.exp() * (p_V - q_V)).sum())
    if math.isnan(found):
        raise ValueError("the logits are no numbers")
    return max(0.0, found)


def _kept(computed: Computed, reused: list[int]) -> Mapping[int, tuple[torch.Tensor, ...]]:
    """What is compared of each attention layer."""
    of_reused = {layer: tuple(kept_TW[reused] for kept_TW in kept) for layer, kept in computed.kept.items()}
    return {**of_reused, **computed.windows}


def _names(spec: ModelSpec, layer: int) -> tuple[str, ...]:
    """Of what an attention layer keeps."""
    return ("keys", "values") if isinstance(spec.layers[layer], GroupedAttention) else ("latents",)
